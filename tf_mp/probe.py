"""One step of a Keras model, run to look at it: the model is left as it was."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tf_mp import runs

__all__ = ["STEPS", "fresh_step", "run_step", "unchanged"]

STEPS = ("train", "test", "predict")


def run_step(model: Any, batch: tuple[Any, ...], *, step: str = "train") -> runs.Run:
    """Runs one step on `batch` under TensorFlow's run metadata and reads the graphs that ran.

    At several ranks every rank must call it: a training step reduces gradients over all of them.

    Args:
        model: a compiled Keras model.
        batch: ``(x, y)`` or ``(x, y, sample_weight)`` as arrays, (local_batch, ...) each.
        step: "train", "test" or "predict".
    """
    with unchanged(model, batch[0]):
        run_once = fresh_step(model, batch, step=step)
        return runs.record(run_once)


def fresh_step(model: Any, batch: tuple[Any, ...], *, step: str = "train") -> Callable[[], Any]:
    """A new function that takes Keras's own step on `batch`; the model keeps the one it has.

    Raises:
        ValueError: `step` is unknown, or the model runs eagerly, so that there is no graph.
    """
    import tensorflow as tf

    if step not in STEPS:
        raise ValueError(f"No such step. Received: {step=}. Expected one of {STEPS}.")
    if model.run_eagerly:
        raise ValueError(
            "A model that runs eagerly has no graph to prove. "
            "Received: run_eagerly=True. Compile it with run_eagerly=False."
        )
    attribute = f"{step}_function"
    kept, steps_per_execution = getattr(model, attribute), model.steps_per_execution
    try:
        model.steps_per_execution = 1
        getattr(model, f"make_{attribute}")(force=True)
        function = getattr(model, attribute)
    finally:
        setattr(model, attribute, kept)
        model.steps_per_execution = steps_per_execution
    data = tf.data.Dataset.from_tensors(batch if step != "predict" else batch[:1]).repeat()
    iterator = iter(data)
    if step == "predict":
        return lambda: function([next(iterator)])
    return lambda: function(iterator)


@contextlib.contextmanager
def unchanged(model: Any, inputs: Any = None) -> Iterator[None]:
    """Puts weights, optimizer, metrics, seeds and Python's generators back at the end.

    Variables are built first where they are not yet; that is what the first step would do.
    """
    import keras

    if not model.built and inputs is not None:
        model(keras.tree.map_structure(lambda tensor: tensor[:1], inputs))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    values = [(variable, variable.numpy()) for variable in _state(model)]
    generators = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for metric in model.metrics:
            metric.reset_state()
        for variable, value in values:
            variable.assign(value)
        random.setstate(generators[0])
        np.random.set_state(generators[1])


def _state(model: Any) -> list[Any]:
    optimizer = getattr(model, "optimizer", None)
    found = [*model.variables, *model.metrics_variables]
    found += list(optimizer.variables) if optimizer is not None else []
    return list({id(variable): variable for variable in found}.values())
