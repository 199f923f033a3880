"""Where an optimizer's own variables live: slots with their weights, the rest with stage 0."""

from typing import Any

import keras

from tf_mp import compat
from tf_mp.recording import device_index

__all__ = ["rebind", "settle", "shared"]


def settle(optimizer: Any, device: str) -> None:
    """Moves what an optimizer keeps once for all variables to the first stage's device."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    for owner in {id(optimizer): optimizer, id(inner): inner}.values():
        for variable in shared(owner):
            found = device_index(compat.raw(variable).device)
            if found != device_index(device):
                compat.initialise_on(variable, device)


def shared(optimizer: Any) -> list[keras.Variable]:
    """Attributes that are variables themselves: the step counter, the learning rate, ..."""
    return [v for v in vars(optimizer).values() if isinstance(v, keras.Variable)]


def rebind(optimizer: Any, devices: dict[int, str]) -> None:
    """Moves the slots of a built optimizer to its variables' devices, with their values.

    Args:
        optimizer: A built Keras optimizer whose variables were moved.
        devices: Device of each trainable variable, by the id of the Keras variable.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    variables = inner._trainable_variables
    inner._trainable_variables_indices = {inner._var_key(v): i for i, v in enumerate(variables)}
    for slots in vars(inner).values():
        if not isinstance(slots, (list, tuple)) or len(slots) != len(variables):
            continue
        if slots is variables or slots is inner._variables:
            continue
        for slot, variable in zip(slots, variables, strict=True):
            if isinstance(slot, keras.Variable) and id(variable) in devices:
                compat.initialise_on(slot, devices[id(variable)])
