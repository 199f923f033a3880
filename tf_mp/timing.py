"""How long the forward and the backward of a stage take, measured on its device.

A stage is timed alone, with the function that the pipeline calls, on one micro-batch. What is
subtracted is the call itself: a function with the same arguments that does nothing. Nothing of the
model changes: weights and state go in as values, and the new state is dropped.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tf_mp import compat
from tf_mp.graph import Operation
from tf_mp.stage import Made, Stage, Tensors, seal

__all__ = [
    "StageRun",
    "Times",
    "alone",
    "plain_copy",
    "time_functions",
    "time_transfer",
    "update_function",
]

Pick: TypeAlias = Callable[[list[float]], float]

_TRANSFER_BYTES = 16 * 2**20


class Times(NamedTuple):
    """Milliseconds of a forward and of a backward, and what was subtracted for the call."""

    forward_ms: float
    backward_ms: float
    call_ms: float


class StageRun:
    """One stage with one micro-batch, ready to be timed.

    Args:
        stage: The stage; a copy of it is run, so its own traces stay as they are.
        inputs: For each of its inputs a tensor (micro_batch, ...), or None.
        masks: For each of its inputs a Keras mask, or None.

    Attributes:
        outputs: For each output of the stage its tensor.
        masks: For each output its Keras mask, or None.
    """

    def __init__(self, stage: Stage, inputs: Tensors, masks: Tensors) -> None:
        """Copies the stage's values to its device and runs the forward once."""
        self._stage = dataclasses.replace(stage, eager=False)
        with tf.device(stage.device):
            groups = (stage.weights, stage.state, stage.seeds)
            own = [[tf.identity(compat.raw(v)) for v in group] for group in groups]
            values = *own, _copied(inputs), _copied(masks)
            self._token = tf.zeros([])
            self._values = *values, tf.constant(0, tf.int64), tf.constant(0, tf.int64)
        made = dataclasses.replace(stage, eager=True).forward(True)(*self._values, self._token)
        self.outputs, self.masks = made.outputs, made.masks
        self._functions: dict[str, Any] = {}

    def times_ms(
        self, wanted: Sequence[bool], repeats: int = 5, pick: Pick = min
    ) -> "Times":
        """The time of the forward, and of the backward without a repeated forward.

        Args:
            wanted: For each input whether the backward computes its gradient.
            repeats: Runs of each, after two that do not count.
            pick: Which of them counts: the quickest to compare operations, where what else the
                machine does is noise; the median to tell what a step will take.
        """
        call_ms, forward_ms, *rest = time_functions(self._runs(wanted), repeats, pick)
        both_ms = rest[0] if rest else forward_ms
        return Times(
            max(forward_ms - call_ms, 0.0), max(both_ms - max(forward_ms, call_ms), 0.0), call_ms
        )

    def accumulate_ms(
        self, wanted: Sequence[bool], repeats: int = 5, pick: Pick = min
    ) -> float:
        """The time that adding its gradients to the sums of earlier micro-batches takes.

        Args:
            wanted: As for `times_ms`.
            repeats: As for `times_ms`.
            pick: As for `times_ms`.
        """
        stage, token = self._stage, self._token
        if not stage.weights:
            return 0.0
        found = self._both(wanted)(*self._values, self._upstream(), token)[1]
        gradients = [g for g in found[: len(stage.weights)] if g is not None]
        nothing = self._function("no_sum", lambda *args: args[-1] + 0.0)
        finish = self._function("sum", lambda *args: stage.finish()(*args))
        call_ms, sum_ms = time_functions(
            [
                lambda: nothing(gradients, gradients, [], token),
                lambda: finish(gradients, gradients, [], token)[-1],
            ],
            repeats, pick,
        )  # fmt: skip
        return max(sum_ms - call_ms, 0.0)

    def load(self, wanted: Sequence[bool]) -> Callable[[], object]:
        """A function that runs forward and backward (the forward alone if nothing is trained)."""
        run = self._runs(wanted)[-1]
        return lambda: run().numpy()

    def _runs(self, wanted: Sequence[bool]) -> list[Callable[[], tf.Tensor]]:
        """The call alone, the forward, and, where something is trained, both halves together."""
        stage, values, token = self._stage, self._values, self._token
        upstream, both = self._upstream(), self._both(wanted)
        # What it made is a result too: else TensorFlow leaves it out.
        forward = self._function("forward", lambda *args: _fields(stage.forward(True)(*args)))
        nothing = self._function("nothing", lambda *args: args[-1] + 0.0)
        runs = [
            lambda: nothing(*values, upstream, token),
            lambda: forward(*values, token)[-1],
            lambda: both(*values, upstream, token)[-1],
        ]
        return runs if stage.weights or any(wanted) else runs[:2]

    def _both(self, wanted: Sequence[bool]) -> Any:
        body = _forward_and_backward(self._stage, wanted)
        return self._function("forward_and_backward", body)

    def _function(self, name: str, body: Callable[..., Any]) -> Any:
        """A function also where the stage is none, because it loops: the step is one."""
        if name not in self._functions:
            placed = self._stage._on_device(body)
            self._functions[name] = tf.function(placed, autograph=False)
        return self._functions[name]

    def _upstream(self) -> Tensors:
        return [tf.ones_like(t) for t in self.outputs if _is_floating(t)]


def alone(operation: Operation, device: str) -> Stage:
    """A stage of one operation, to be timed by itself."""
    generators = compat.seed_generators(operation.target)
    ordinals = {id(generator.state): index for index, generator in enumerate(generators)}
    return Stage(0, device, (operation,), operation.inputs, operation.outputs, ordinals)


def update_function(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    device: str,
) -> Callable[[], tf.Tensor]:
    """One optimizer step on copies of some variables, as a function to be timed.

    Args:
        optimizer: Any Keras optimizer; a new one of its kind is used.
        variables: The trainable variables of a stage, at least one; they stay as they are.
        device: Where they live.
    """
    with tf.device(device):
        copies = [keras.Variable(tf.ones(v.shape, v.dtype), dtype=v.dtype) for v in variables]
        gradients = [tf.zeros(v.shape, v.dtype) for v in variables]
        copied = plain_copy(optimizer)
        copied.build(copies)

    @tf.function(autograph=False, jit_compile=False)
    def update() -> tf.Tensor:
        with tf.device(device), compat.one_replica(copied):
            copied.apply(gradients, copies)
            with tf.control_dependencies([compat.raw(copied.iterations).read_value()]):
                return tf.zeros([])

    return update


def plain_copy(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A new optimizer of the same kind and settings, without wrappers and without state."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return keras.optimizers.deserialize(keras.optimizers.serialize(inner))


def time_transfer(source: str, target: str, repeats: int = 5) -> float:
    """Milliseconds that a byte takes from one device to another; 0 on one device."""
    if source == target:
        return 0.0
    with tf.device(source):
        sent = tf.zeros([_TRANSFER_BYTES // 4])

    @tf.function(autograph=False)
    def move(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(target):
            return tf.identity(tensor)[0]

    return time_functions([lambda: move(sent)], repeats)[0] / _TRANSFER_BYTES


def time_functions(
    runs: Sequence[Callable[[], tf.Tensor]], repeats: int, pick: Pick = min
) -> list[float]:
    """For each function the milliseconds until the scalar that it returns is known.

    The times are subtracted from each other, so the functions take turns. Of so many runs of each
    one counts: the quickest, for what else the machine does can only add time, or as `pick` says.
    """
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(-2, repeats):
        for run, own in zip(runs, times, strict=True):
            start = time.perf_counter()
            run().numpy()
            if turn >= 0:
                own.append(1000 * (time.perf_counter() - start))
    return [pick(own) for own in times]


def _forward_and_backward(stage: Stage, wanted: Sequence[bool]) -> Callable[..., Any]:
    def body(*arguments: Any) -> tuple[Any, ...]:
        *values, upstream, token = arguments
        weights, inputs = values[0], values[3]
        sources = [*weights, *(t for t, want in zip(inputs, wanted, strict=True) if want)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            made = stage.forward(True)(*values, token)
        outputs, loss = made.outputs, made.loss
        targets = [t for t in outputs if _is_floating(t)]
        given = list(upstream)
        if loss is not None:
            targets, given = [*targets, loss], [*given, tf.ones_like(loss)]
        gradients = tape.gradient(targets, sources, output_gradients=given)
        # The outputs are results too: else TensorFlow leaves out what only they need.
        return outputs, gradients, seal([*outputs, *made.state, *gradients], made.token)

    return body


def _fields(made: Made) -> tuple[Any, ...]:
    return made.outputs, made.masks, made.state, made.loss, made.token


def _copied(tensors: Tensors) -> Tensors:
    return [None if tensor is None else tf.identity(tensor) for tensor in tensors]


def _is_floating(tensor: Any) -> bool:
    return tensor is not None and tensor.dtype.is_floating
