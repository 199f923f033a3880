"""The usual idiom: a plain Keras model with `tf.device` scopes, and where it really computes.

Every tutorial shows layers made inside ``with tf.device(...)``. That places their variables, and
nothing else: Keras calls the layers later, without the scopes. Here the same proof is taken of
such a model as of ours. Each layer is called inside the name scope of the stage that it was
written for, so that the names of its operations tell where its author wanted them.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tf_mp import opnames, placement, probe, rules, runs

__all__ = ["stages_by_device", "verify_usual_idiom", "write_usual_idiom"]


def verify_usual_idiom(
    model: Any,
    batch: tuple[Any, ...],
    *,
    devices: Sequence[str],
    stages: Mapping[str, int] | None = None,
    step: str = "train",
) -> placement.Proof:
    """Proves where a plain model, written with `tf.device` scopes, computes.

    Args:
        model: a compiled plain Keras model.
        batch: ``(x, y)`` or ``(x, y, sample_weight)`` as arrays of one local batch.
        devices: the device of each stage.
        stages: the stage of each layer by name; by default where the layer's variables are, and
            a layer without variables goes with the layer before it.
        step: "train", "test" or "predict".
    """
    devices = [runs.device_name(device) for device in devices]
    stages = dict(stages or stages_by_device(model, devices))
    with _scoped_layers(model, stages):
        run = probe.run_step(model, batch, step=step)
    optimizer = getattr(getattr(model, "optimizer", None), "name", "")
    guess = rules.Guess(
        stage_of_device=lambda device: devices.index(device) if device in devices else None,
        optimizer=optimizer,
    )
    layers = [[name for name in stages if stages[name] == k] for k in range(len(devices))]
    return placement.judge(run, devices, layers=layers, guess=guess)


def stages_by_device(model: Any, devices: Sequence[str]) -> dict[str, int]:
    """The stage of each layer, read from the devices of its variables.

    Raises:
        ValueError: a variable lies on a device that no stage has.
    """
    stages: dict[str, int] = {}
    stage = 0
    for layer in model.layers:
        if layer.variables:
            device = runs.device_name(layer.variables[0].value.device)
            if device not in devices:
                raise ValueError(
                    f"A layer lies on a device of no stage. Received: {layer.name} on {device}. "
                    f"Expected one of {tuple(devices)}."
                )
            stage = devices.index(device)
        stages[layer.name] = stage
    return stages


def write_usual_idiom(model: Any, stages: Mapping[str, int], devices: Sequence[str]) -> Any:
    """The same model as a tutorial would write it: each layer made under its stage's device.

    Args:
        model: a functional or Sequential Keras model; it is copied and stays as it is.
        stages: the stage of each layer by name.
        devices: the device of each stage.
    """
    import keras
    import tensorflow as tf

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        with tf.device(devices[stages.get(layer.name, 0)]):
            return layer(*args, **kwargs)

    return keras.models.clone_model(model, call_function=call)


@contextlib.contextmanager
def _scoped_layers(model: Any, stages: Mapping[str, int]) -> Iterator[None]:
    """Lets each layer be called inside its stage's name scope; devices are not touched."""
    changed = [layer for layer in model.layers if layer.name in stages]
    for layer in changed:
        layer.call = _in_scope(layer.call, opnames.scope(stages[layer.name], "forward", 0))
    try:
        yield
    finally:
        for layer in changed:
            del layer.call


def _in_scope(call: Any, scope: str) -> Any:
    import tensorflow as tf

    @functools.wraps(call)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        with tf.name_scope(scope):
            return call(*args, **kwargs)

    return scoped
