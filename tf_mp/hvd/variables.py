"""Names of variables, the same on every rank, and where variables lie."""

import re
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat

__all__: list[str] = []

# Horovod pairs the reductions of the ranks by the last part of the operation's name.
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.\-]")
_NAMES_IN_GRAPH = "tf_mp/hvd/names"


def tensor_of(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable; anything else as it is."""
    return compat.raw(variable) if isinstance(variable, keras.Variable) else variable


def path(variable: Any) -> str:
    """A Keras variable's path, or the name of a plain TensorFlow variable."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", "tensor"))


def key(variable: Any) -> int:
    """What identifies a variable, whether Keras's or TensorFlow's own object is given."""
    return id(tensor_of(variable))


def device(variable: Any) -> str:
    """The device on which a variable lies; empty for a tensor that knows none."""
    return str(getattr(tensor_of(variable), "device", "") or "")


def operation_name(kind: str, parts: Iterable[str]) -> str:
    """A name for a collective, from the paths of the variables that take part.

    It never depends on what else the graph holds, for ranks may build different graphs (another
    number of micro-batches, for one). A second collective of the same name in the same graph is
    numbered, so that two models with the same paths can train in one function.

    Args:
        kind: what is done, for instance `allreduce`.
        parts: paths of variables; of many, the first, the last and their number are used.
    """
    paths = [_NOT_IN_A_NAME.sub(".", part) for part in parts]
    middle = [] if len(paths) < 2 else [f"to_{paths[-1]}", f"{len(paths)}_tensors"]
    name = ".".join([f"Horovod_{kind}", *paths[:1], *middle])
    if tf.executing_eagerly():
        return name
    used = tf.compat.v1.get_default_graph().get_collection_ref(_NAMES_IN_GRAPH)
    number = used.count(name)
    used.append(name)
    return f"{name}.{number}" if number else name


def flat_variables(model: keras.Model, optimizer: Any = None) -> list[Any]:
    """The variables of a model and of an optimizer (default: the compiled one), each once."""
    optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
    listed = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    return list({key(variable): variable for variable in listed}.values())
