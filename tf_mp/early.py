"""What of a gradient needs only the forward, and must not run before its turn.

A tape hands what it kept of the forward to the backward without asking. What depends on that
alone, such as the slope of a GELU, could run during the forward, whatever the schedule says, and
its results would lie in memory until the backward needs them. So what such operations read has to
wait for the token of their action. All the rest waits through the upstream gradients anyway and is
left alone: oneDNN finds a pooling and its gradient only where nothing stands between them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_mp import compat
from tf_mp.stage import LOOPS, gate

__all__ = ["waits"]

#: Operations without a cost, or folded before the graph runs.
_FREE = {
    "Const", "Identity", "IdentityN", "NoOp", "Placeholder", "Rank", "Shape", "ShapeN", "Size",
}  # fmt: skip


@contextlib.contextmanager
def waits(token: tf.Tensor, upstream: Sequence[Any]) -> Iterator[None]:
    """Within it early operations are made to wait; it does nothing eagerly.

    Args:
        token: scalar that the action waits for.
        upstream: tensors that wait for the token already, or None; what needs them is not early.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = set(graph.get_operations())
    yield
    late = {part.ref() for part in tf.nest.flatten(list(upstream), True) if part is not None}
    gated: dict[Any, Any] = {}
    feeding = _feeding(before)
    for operation in [op for op in graph.get_operations() if op not in before]:
        if operation in feeding:
            continue
        inputs = list(operation.inputs)  # each replacement makes TensorFlow gather them anew
        for place in _early(operation, [tensor.ref() in late for tensor in inputs]):
            tensor = inputs[place]
            if tensor.op not in before or tensor.op.type == "Const":
                continue
            if tensor.ref() not in gated:
                gated[tensor.ref()] = gate([tensor], token)[0]
            compat.replace_input(operation, place, gated[tensor.ref()])
        if inputs:
            late.update(tensor.ref() for tensor in operation.outputs)


def _feeding(before: set[tf.Operation]) -> set[tf.Operation]:
    """New operations that older ones need: the gradient of a loop gives the loop more inputs."""
    found: set[tf.Operation] = set()
    loops = [operation for operation in before if operation.type in LOOPS]
    waiting = [tensor.op for loop in loops for tensor in loop.inputs]
    while waiting:
        operation = waiting.pop()
        if operation not in before and operation not in found:
            found.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
            waiting += operation.control_inputs
    return found


def _early(operation: tf.Operation, is_late: list[bool]) -> list[int]:
    """The inputs of an operation, or of a call, that operations read which need no late one."""
    body = compat.body_of(operation)
    if body is None:
        return [] if any(is_late) or operation.type in _FREE else list(range(len(is_late)))
    late = {arg.ref() for arg, one in zip(body.inputs, is_late, strict=True) if one}
    reads: dict[Any, set[Any]] = {arg.ref(): {arg.ref()} for arg in body.inputs}
    found: set[Any] = set()
    for inner in body.get_operations():
        inputs = [tensor.ref() for tensor in inner.inputs]
        if any(ref in late for ref in inputs):
            late.update(tensor.ref() for tensor in inner.outputs)
            continue
        needs = set().union(*(reads.get(ref, set()) for ref in inputs))
        if inner.type not in _FREE:
            found |= needs
        if inputs:
            reads.update((tensor.ref(), needs) for tensor in inner.outputs)
    return [place for place, arg in enumerate(body.inputs) if arg.ref() in found]
