"""A Keras model as an ordered list of operations and the tensors between them.

Nested models are opened: their inner calls become operations of their own, so that a cut may lie
inside. A layer that is called twice gives two operations. What Keras does between the calls of a
functional model (conversion of a nested model's inputs) is an operation too: nothing of the model
is left out, and nothing is run twice.

A tensor is known by a *key*, an integer. Masks travel with their tensor.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_mp import compat

__all__ = ["Graph", "Operation", "trace"]

Values = dict[int, Any]


@dataclasses.dataclass(eq=False)
class Operation:
    """One call of a layer or of a Keras operation.

    Attributes:
        name: Unique in the graph; the layer's name, with the nested model's name before it.
        target: The layer or operation that is called.
        inputs: Keys of the tensors it reads.
        outputs: Keys of the tensors it makes.
        run: `run(values, training)` reads its inputs from `values` (key -> tensor) and writes its
            outputs there.
        scope: Device of the person's own `tf.device` block around the call, if there was one.
        shapes: For each output its shape, batch dimension first (None where unknown).
        dtypes: For each output its dtype, by name.
    """

    name: str
    target: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[[Values, bool], None]
    scope: str | None = None
    shapes: tuple[tuple[int | None, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the layer: weights, state, seeds; empty for an operation."""
        return list(getattr(self.target, "variables", ()))


@dataclasses.dataclass(eq=False)
class Graph:
    """A model in the order in which it runs.

    Attributes:
        model: The Keras model.
        function: The functional graph that standardises its inputs and names its outputs.
        inputs: Keys of the model's inputs, in Keras's flat order.
        outputs: Keys of the model's outputs, in Keras's flat order.
        operations: The calls, each after those that it needs.
    """

    model: keras.Model
    function: compat.Functional
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[Operation, ...]

    def producer(self) -> dict[int, Operation]:
        """The operation that makes each tensor; model inputs have none."""
        return {key: op for op in self.operations for key in op.outputs}


def trace(model: keras.Model, function: compat.Functional | None = None) -> Graph:
    """Reads the operations of a built Keras model.

    Args:
        model: A functional or Sequential model, or any other with `function` given.
        function: The functional graph that computes the same as the model (for a subclassed one).

    Raises:
        ValueError: for a model that Keras did not record as a graph.
    """
    function = function or compat.as_function(model)
    if function is None:
        raise ValueError(_not_traceable(model))
    tracer = _Tracer()
    inputs = tuple(tracer.new_key() for _ in function.inputs)
    outputs = tracer.open(function, inputs, "", None)
    return Graph(model, function, inputs, outputs, tuple(tracer.operations))


def _not_traceable(model: keras.Model) -> str:
    if isinstance(model, keras.Sequential):
        return (
            f"The model {model.name!r} has no graph yet. Received: a Sequential model without an "
            "input. Expected: keras.Input(shape=...) as its first entry."
        )
    return (
        f"The model {model.name!r} cannot be split. Received: {type(model).__name__}, whose "
        "`call` Keras did not record. Expected: a functional or Sequential model, or "
        "`parallelize(model, inputs=keras.Input(...))` for a subclassed model whose `call` uses "
        "Keras layers and keras.ops only."
    )


class _Tracer:
    """Opens nested models and numbers tensors while walking a model's calls."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._keys: Iterator[int] = itertools.count()
        self._names: dict[str, int] = {}

    def new_key(self) -> int:
        return next(self._keys)

    def open(
        self, function: compat.Functional, inputs: tuple[int, ...], prefix: str, scope: str | None
    ) -> tuple[int, ...]:
        """Adds the calls of a functional graph; returns the keys of its outputs."""
        keys = {id(tensor): key for tensor, key in zip(function.inputs, inputs, strict=True)}
        for node in compat.graph_nodes(function):
            self._add(node, keys, prefix, getattr(node, "tf_mp_device", None) or scope)
        return tuple(keys[id(tensor)] for tensor in function.outputs)

    def _add(self, node: Any, keys: dict[int, int], prefix: str, scope: str | None) -> None:
        tensors = node.arguments.keras_tensors
        if any(id(tensor) not in keys for tensor in tensors):
            return  # as in Keras: a call of the layer that belongs to another model
        name = prefix + node.operation.name
        inner = self._nested(node)
        if inner is not None:
            entry = self._enter(node, inner, keys, name, scope)
            made = self.open(inner, entry, name + "/", scope)
        else:
            made = tuple(self.new_key() for _ in node.outputs)
            self._append(name, node.operation, tensors, keys, made, node.outputs, scope, node)
        keys.update(zip(map(id, node.outputs), made, strict=True))

    def _nested(self, node: Any) -> compat.Functional | None:
        """The graph of a nested model that can be opened; one with arguments stays whole."""
        target, arguments = node.operation, node.arguments
        if not isinstance(target, keras.Model) or target.activity_regularizer is not None:
            return None
        if len(arguments.args) != 1 or arguments.kwargs:
            return None
        return compat.as_function(target)

    def _enter(
        self, node: Any, inner: Any, keys: dict[int, int], name: str, scope: str | None
    ) -> tuple[int, ...]:
        """The operation that converts the inputs of a nested model as Keras does."""
        made = tuple(self.new_key() for _ in inner.inputs)
        slots = {id(t): keys[id(t)] for t in node.arguments.keras_tensors}

        def run(values: Values, training: bool) -> None:
            args, _ = node.arguments.fill_in({i: values[key] for i, key in slots.items()})
            values.update(zip(made, inner._standardize_inputs(args[0]), strict=True))

        self.operations.append(
            Operation(
                self._unique(name + "/inputs"), inner, tuple(slots.values()), made, run, scope,
                *_spec(inner.inputs),
            )
        )  # fmt: skip
        self.operations[-1].target = None  # its variables belong to the calls inside
        return made

    def _append(
        self,
        name: str,
        target: Any,
        tensors: list[Any],
        keys: dict[int, int],
        made: tuple[int, ...],
        symbols: list[Any],
        scope: str | None,
        node: Any,
    ) -> None:
        slots = {id(t): keys[id(t)] for t in tensors}
        context = getattr(target, "_call_context_args", {})

        def run(values: Values, training: bool) -> None:
            args, kwargs = node.arguments.fill_in({i: values[key] for i, key in slots.items()})
            if "training" in context:
                kwargs["training"] = training
            outputs = keras.tree.flatten(target(*args, **kwargs))
            values.update(zip(made, outputs, strict=True))

        self.operations.append(
            Operation(
                self._unique(name), target, tuple(slots.values()), made, run, scope,
                *_spec(symbols),
            )
        )  # fmt: skip

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}:{count}" if count else name


def _spec(symbols: list[Any]) -> tuple[tuple[tuple[int | None, ...], ...], tuple[str, ...]]:
    return tuple(tuple(s.shape) for s in symbols), tuple(s.dtype for s in symbols)
