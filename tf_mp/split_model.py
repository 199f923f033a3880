"""What a split model is: the person's own object under a class made at run time.

The class runs the steps of training, evaluation and prediction through the pipeline, and says that
it is the plain class: so everything that saves, clones or exports the model writes the plain,
unsplit one.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, recording, slots, step, train_step, update, world
from tf_mp.pipeline import Pipeline

__all__ = ["reclass"]


def reclass(model: keras.Model) -> None:
    """Gives a model that has a plan a run-time subclass of its own class."""
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
    if model.compiled:
        _check_compiled(model)


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
        return train_step.train(self._tf_mp_pipeline, self, data)

    def test_step(self, data: Any) -> Any:
        return step.test(self._tf_mp_pipeline, self, data)

    def predict_step(self, data: Any) -> Any:
        return step.predict(self._tf_mp_pipeline, self, data)

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
        slots.settle(model.optimizer, model._tf_mp_pipeline.stages[0].device)
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
        gpus = [s.device for s in model._tf_mp_pipeline.stages if "GPU" in s.device.upper()]
        #: With a GPU TensorFlow's own rewriting is left as it is: nobody has measured it there.
        self._rewriting = contextlib.nullcontext if gpus else compat.rewritten_once

    def __call__(self, data: Any) -> Any:
        data = keras.tree.map_structure(_tensor, data)
        if self._model.run_eagerly:
            return self._body(data)
        size = next(int(t.shape[0]) for t in keras.tree.flatten(data) if t is not None)
        if size not in self._traced:
            self._traced[size] = tf.function(self._body, autograph=False)
        with self._rewriting():
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
