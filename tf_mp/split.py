"""`parallelize`: a Keras model becomes the same model, split into stages.

Here are the decisions and the refusals; `split_model.py` is what the model then is.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tf_mp import compat, cutting, pipeline, recording, slots, world
from tf_mp import schedule as schedules
from tf_mp import split_model
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
    graph = trace(model, recording.subclassed(model, inputs) if inputs is not None else None)
    _check_operations(graph)

    def in_flight(count: int) -> list[int]:
        table = schedules.build(schedule, count, micro_batches or _default(count))
        return [table.in_flight_max(k) for k in range(count)]

    cut = cutting.resolve(graph, cuts, stages, devices, _measure, max_bytes, in_flight)
    plan = _plan(graph, cut, micro_batches, schedule, recompute)
    moved = pipeline.move(plan)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        slots.rebind(optimizer, moved)
    object.__setattr__(model, "_tf_mp_pipeline", plan)
    split_model.reclass(model)
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


def _check_operations(graph: Graph) -> None:
    """Refuses layers whose collectives would run once a micro-batch."""
    for operation in graph.operations:
        if type(operation.target).__qualname__ == "SyncBatchNormalization":
            raise ValueError(
                f"The layer {operation.name!r} cannot be split. Received: SyncBatchNormalization, "
                "whose ranks would wait for each other in every micro-batch. Expected: "
                "keras.layers.BatchNormalization; its statistics are averaged over the ranks."
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
