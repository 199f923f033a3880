"""`parallelize`: a Keras model becomes the same model, split into stages.

The object stays what it was. Its class is replaced by one made at run time that runs the steps of
training, evaluation and prediction through the pipeline, and that says it is the plain class: so
everything that saves, clones or exports the model writes the plain, unsplit one.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, cutting, pipeline, recording, step, update, world
from tf_mp import schedule as schedules
from tf_mp.graph import Graph, trace
from tf_mp.pipeline import Pipeline
from tf_mp.stage import Stage

__all__ = ["parallelize"]

_OVERRIDES = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def parallelize(
    model: keras.Model | Callable[[], keras.Model],
    *,
    cuts: Any = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    devices: Sequence[str | int] | None = None,
    recompute: bool | Sequence[bool] = False,
    max_bytes: int | Sequence[int | None] | None = None,
    inputs: Any = None,
) -> keras.Model:
    """Splits a Keras model into stages over the devices of this process.

    Args:
        model: A function without arguments that builds a Keras model (run on the host, so that
            its `tf.device` blocks are seen and no device ever holds all of it), or a built model.
        cuts: Where to cut: `"scopes"` (the `tf.device` blocks), `"auto"` (measured), names of the
            layers that begin the stages after the first, a balance (`[4, 3]`), or a function from
            an operation (with `name`, `variables`) to its stage. Default: `"scopes"` where two
            were seen, else `"auto"`.
        stages: Number of stages. Default: as the cut says, else one for each device.
        micro_batches: Micro-batches of a local batch. Default: 2 x stages (1 for one stage).
        schedule: `"1f1b"` or `"gpipe"`.
        devices: For each stage its device, by name or index; several may share one. Default: one
            each, in order.
        recompute: Keep only stage inputs, and redo the forward in the backward; for all stages or
            one value for each.
        max_bytes: Memory limit of a stage for `"auto"`, in bytes; one for all or one for each.
        inputs: For a subclassed model `keras.Input(...)`, in the structure that its `call` takes.

    Returns:
        The model itself (or the one that was built), split. It trains, evaluates, predicts and
        saves as before; `tf_mp.pipeline_of(model)` gives the plan.

    Raises:
        ValueError: for a model or a cut that cannot be; it says what was expected.
    """
    _check_counts(micro_batches, stages, schedule)
    if not isinstance(model, keras.Model):
        model = recording.build(model)
    _check_model(model)
    graph = trace(model, compat.subclassed(model, inputs) if inputs is not None else None)

    def in_flight(count: int) -> list[int]:
        table = schedules.build(schedule, count, micro_batches or _default(count))
        return [table.in_flight_max(k) for k in range(count)]

    cut = cutting.resolve(graph, cuts, stages, devices, _measure, max_bytes, in_flight)
    plan = _plan(graph, cut, micro_batches, schedule, recompute)
    moved = pipeline.move(plan)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        update.rebind(optimizer, moved)
    object.__setattr__(model, "_tf_mp_pipeline", plan)
    _reclass(model)
    if model.compiled:
        _check_compiled(model)
    world.say(_summary(plan))
    return model


def _measure(graph: Graph, stages: int) -> Any:
    from tf_mp import cost

    return cost.for_partition(graph, stages)


def _default(stages: int) -> int:
    """Micro-batches where none are asked for."""
    return 2 * stages if stages > 1 else 1


def _check_counts(micro_batches: int | None, stages: int | None, name: str) -> None:
    for what, value in (("micro_batches", micro_batches), ("stages", stages)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"Received: {what}={value!r}. Expected: an integer of at least 1.")
    schedules.build(name, 1, 1)


def _check_model(model: keras.Model) -> None:
    if getattr(model, "_tf_mp_pipeline", None) is not None:
        raise ValueError(
            f"The model {model.name!r} is split already. Received: a model that parallelize "
            "returned. Expected: the plain model; build it anew to cut it otherwise."
        )
    plain = {name: getattr(keras.Model, name) for name in _OVERRIDES}
    changed = [name for name in _OVERRIDES if getattr(type(model), name) is not plain[name]]
    if changed:
        raise ValueError(
            f"The model {model.name!r} cannot be split. Received: {type(model).__name__}, which "
            f"overrides {', '.join(changed)}. Expected: Keras's own; the pipeline replaces them, "
            "and would ignore yours. Use add_loss, a custom loss or a custom metric instead."
        )


def _plan(
    graph: Graph, cut: cutting.Cut, micro_batches: int | None, name: str, recompute: Any
) -> Pipeline:
    found, operations = cut.partition, graph.operations
    groups = [tuple(operations[found.order[place]] for place in span) for span in found.stages]
    count = len(groups)
    again = (recompute,) * count if isinstance(recompute, bool) else tuple(recompute)
    if len(again) != count:
        raise ValueError(
            f"Received: recompute={recompute!r} for {count} stages. Expected: True, False, or one "
            "of them for each stage."
        )
    generators = [g for op in operations for g in compat.seed_generators(op.target)]
    ordinals: dict[int, int] = {}
    for generator in generators:
        ordinals.setdefault(id(generator.state), len(ordinals))
    made = [{key for op in group for key in op.outputs} for group in groups]
    read = [_ordered(key for op in group for key in op.inputs) for group in groups]
    stages = []
    for k, group in enumerate(groups):
        inputs = tuple(key for key in read[k] if key not in made[k])
        later = {key for reads in read[k + 1 :] for key in reads} | set(graph.outputs)
        outputs = tuple(key for op in group for key in op.outputs if key in later)
        stages.append(Stage(k, cut.devices[k], group, inputs, outputs, ordinals))
    _check_complete(graph, stages)
    number = micro_batches or _default(count)
    if count > 1 and number < count:
        warnings.warn(
            f"{number} micro-batches for {count} stages: every device idles at least "
            f"{1 - number / (number + count - 1):.0%} of the step (the bubble). Use "
            f"micro_batches={2 * count} or more.",
            stacklevel=3,
        )
    return Pipeline(graph, cut, tuple(stages), number, name, again)


def _ordered(keys: Any) -> list[int]:
    return list(dict.fromkeys(keys))


def _check_complete(graph: Graph, stages: Sequence[Stage]) -> None:
    """Every operation and every weight of the model is in a stage."""
    assert sum(len(s.operations) for s in stages) == len(graph.operations), "an operation is lost"
    known = {id(v) for stage in stages for v in stage.variables}
    lost = [v.path for v in graph.model.trainable_variables if id(v) not in known]
    if lost:
        raise ValueError(
            f"The model {graph.model.name!r} cannot be split. Received: trainable variables that "
            f"no recorded call uses: {', '.join(lost[:5])}. Expected: weights that belong to the "
            "layers between the inputs and the outputs."
        )


def _summary(plan: Pipeline) -> str:
    size, m = world.current().size, plan.micro_batches
    return (
        f"{plan.graph.model.name} in {len(plan.stages)} stages by {plan.cut.kind}, "
        f"{m} micro-batches, schedule {plan.schedule}, world size {size}\n  "
        + plan.describe().replace("\n", "\n  ")
    )


def _reclass(model: keras.Model) -> None:
    """Gives the object a run-time subclass of its own class."""
    plain = type(model)
    body = {
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__qualname__": plain.__qualname__,
        # What asks for the class (Keras's serialisation does) gets the plain one.
        "__class__": property(lambda self: plain),
    }
    made = type(plain.__name__, (_Split, plain), body)
    object.__setattr__(model, "__class__", made)


class _Split:
    """The methods that a split model has of its own; mixed into its class at run time."""

    _tf_mp_pipeline: Pipeline

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Keras's; refuses what a pipeline cannot do."""
        bound = compat.bind_compile(*args, **kwargs)
        if bound.get("jit_compile") is True:
            raise ValueError(
                "Received: jit_compile=True. Expected: False or 'auto' for a split model: XLA "
                "cannot span devices, and would ignore the stages."
            )
        stages = self._tf_mp_pipeline.stages
        with tf.device(stages[-1].device):  # loss and metrics live where they are computed
            super().compile(*args, **{**kwargs, **compat.without_jit(args)})  # type: ignore[misc]
        _check_compiled(self)
        if bound.get("run_eagerly"):
            warnings.warn(
                "run_eagerly=True: the actions of the pipeline run one after another.",
                stacklevel=2,
            )
        for stage in stages:
            stage.eager = bool(bound.get("run_eagerly"))
        self._tf_mp_pipeline.reset()

    def _symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        with tf.device(self._tf_mp_pipeline.stages[-1].device):
            super()._symbolic_build(*args, **kwargs)  # type: ignore[misc]

    def train_step(self, data: Any) -> Any:
        return step.train(self._tf_mp_pipeline, self, data)  # type: ignore[arg-type]

    def test_step(self, data: Any) -> Any:
        return step.test(self._tf_mp_pipeline, self, data)  # type: ignore[arg-type]

    def predict_step(self, data: Any) -> Any:
        return step.predict(self._tf_mp_pipeline, self, data)  # type: ignore[arg-type]

    def make_train_function(self, force: bool = False) -> Any:
        if self.train_function is None or force:  # type: ignore[has-type]
            self.train_function = _over_iterator(self, self.train_step, build=True)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        if self.test_function is None or force:  # type: ignore[has-type]
            self.test_function = _over_iterator(self, self.test_step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        if self.predict_function is None or force:  # type: ignore[has-type]
            self.predict_function = _over_list(self, self.predict_step)
        return self.predict_function

    def summary(self, *args: Any, print_fn: Any = None, **kwargs: Any) -> None:
        """As Keras's, and then the stages."""
        super().summary(*args, print_fn=print_fn, **kwargs)  # type: ignore[misc]
        (print_fn or print)(self._tf_mp_pipeline.describe())


def _check_compiled(model: Any) -> None:
    """Checks a compiled model's optimizer, and puts its own variables where they are used."""
    if model.optimizer is not None:
        update.check(model.optimizer)
        _check_wrapped(model.optimizer)
        update.settle(model.optimizer, model._tf_mp_pipeline.stages[0].device)
    model.train_function = model.test_function = model.predict_function = None


def _check_wrapped(optimizer: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    wrapped = hasattr(optimizer, "reduce_gradients") or hasattr(inner, "reduce_gradients")
    size = world.current().size
    if size > 1 and not wrapped:
        raise ValueError(
            f"Received: the optimizer {type(inner).__name__} at world size {size}. Expected: "
            "hvd.DistributedOptimizer(optimizer), or the ranks would train apart."
        )
    passes = getattr(getattr(inner, "distribution", None), "backward_passes_per_step", 1)
    if passes > 1:
        raise ValueError(
            f"Received: backward_passes_per_step={passes} with a split model. Expected: 1; use "
            f"micro_batches x {passes} and a batch {passes} times larger, or Keras's "
            "gradient_accumulation_steps."
        )


class _PerBatchSize:
    """A step as a `tf.function`, traced once for each batch size.

    Micro-batches of the last, smaller batch of an epoch are cut by its real size, so the batch
    dimension is static; the other dimensions may stay open.
    """

    def __init__(self, model: Any, body: Callable[[Any], Any]) -> None:
        self._model, self._body = model, body
        self._traced: dict[int, Callable[[Any], Any]] = {}

    def __call__(self, data: Any) -> Any:
        data = keras.tree.map_structure(_tensor, data)
        if self._model.run_eagerly:
            return self._body(data)
        size = next(int(t.shape[0]) for t in keras.tree.flatten(data) if t is not None)
        if size not in self._traced:
            self._traced[size] = tf.function(self._body, autograph=False)
        return self._traced[size](data)


def _tensor(value: Any) -> Any:
    if value is None or isinstance(value, tf.experimental.Optional):
        return None
    return tf.convert_to_tensor(value) if not tf.is_tensor(value) else value


def _over_iterator(model: Any, body: Callable[[Any], Any], build: bool = False) -> Any:
    run = _PerBatchSize(model, body)

    def function(iterator: Any) -> Any:
        if build:
            _prepare(model)
        outputs = None
        for _ in range(model.steps_per_execution):
            try:
                outputs = run(next(iterator))
            except StopIteration:
                if outputs is None:
                    raise
                break
        return outputs

    return function


def _prepare(model: Any) -> None:
    """Before a training step: the optimizer is built, loss and metrics lie with the last stage."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    last = model._tf_mp_pipeline.stages[-1].device
    for variable in model.metrics_variables:
        if recording.device_index(compat.raw(variable).device) != recording.device_index(last):
            compat.initialise_on(variable, last)


def _over_list(model: Any, body: Callable[[Any], Any]) -> Any:
    run = _PerBatchSize(model, body)

    def function(batches: Sequence[Any]) -> Any:
        outputs = [run(data) for data in batches]
        if len(outputs) == 1:
            return outputs[0]
        return keras.tree.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)

    return function

