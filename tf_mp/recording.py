"""Runs a person's model-building function on the host and notes their `tf.device` blocks.

The device in force at each call of a layer is the *scope* of that call. Variables are made on the
host whatever the block says, so that a model too big for one device can be built, and a machine
without that device keeps the scopes.
"""

import re
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat

__all__ = ["HOST", "build", "device_index", "subclassed"]

HOST = "/device:CPU:0"
_DEVICE = re.compile(r"/(?:device:)?(CPU|GPU|TPU):(\d+)$", re.IGNORECASE)


def device_index(device: str) -> tuple[str, int] | None:
    """Kind and index of a device string, or None where it names none.

    >>> device_index("/job:localhost/replica:0/task:0/device:GPU:1")
    ('GPU', 1)
    """
    found = _DEVICE.search(device)
    return (found.group(1).upper(), int(found.group(2))) if found else None


def build(function: Callable[[], Any]) -> keras.Model:
    """Calls a function that builds a model; each of the model's calls remembers its scope.

    Raises:
        ValueError: if it returns anything but a Keras model.
    """

    def note(node: Any) -> None:
        node.tf_mp_device = compat.device_in_force() or None

    def on_host(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        with tf.device(HOST):
            return next_creator(**kwargs)

    with compat.on_node(note), tf.variable_creator_scope(on_host):
        model = function()
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"Received: {getattr(function, '__name__', function)!r}, which returned "
            f"{type(model).__name__}. Expected: a function without arguments that returns a Keras "
            "model, or a Keras model."
        )
    return model


def subclassed(model: keras.Model, inputs: Any) -> compat.Functional:
    """The functional graph of a subclassed model's `call`, recorded on symbolic inputs.

    Raises:
        ValueError: where `call` does another thing in training than in inference.
    """
    graphs = []
    for training in (False, True):
        if model._call_has_training_arg:
            outputs = model.call(inputs, training=training)
        else:
            outputs = model.call(inputs)
        graphs.append(compat.Functional(inputs, outputs, name=model.name))
    first, second = ([n.operation for n in compat.graph_nodes(graph)] for graph in graphs)
    if [_kind(op) for op in first] != [_kind(op) for op in second]:
        raise ValueError(
            f"The model {model.name!r} cannot be split. Received: a `call` whose operations "
            "differ between training=True and training=False. Expected: the same graph; leave the "
            "difference to layers such as Dropout."
        )
    return graphs[0]


def _kind(operation: Any) -> Any:
    return operation if isinstance(operation, keras.layers.Layer) else type(operation)
