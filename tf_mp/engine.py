"""One batch through the pipeline: the graph of a step, built action by action.

The actions run in the order of the schedule. What a device does is ordered by its token (see
`stage.py`), what crosses between devices by the data itself; nothing else is ordered, so that
stages overlap. Names follow `opnames.py`: an operation's name says where it must run.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_mp import compat, microbatch
from tf_mp.opnames import scope
from tf_mp.recording import HOST
from tf_mp.stage import Made, Stage, Tensors

__all__ = ["Batch", "Engine", "Place"]


class Batch:
    """The local batch cut into micro-batches, on the host.

    Args:
        tensors: The model's flat inputs, (local_batch, ...) each, or None for an absent optional
            one.
        micro_batches: How many are wanted; there are fewer if there are fewer samples.
    """

    def __init__(self, tensors: Sequence[Any], micro_batches: int) -> None:
        first = next(t for t in tensors if t is not None)
        self.size = int(first.shape[0])
        self.sizes = microbatch.sizes(self.size, micro_batches)
        self.offsets = microbatch.offsets(self.sizes)
        self.inputs = [self.slices(tensor) for tensor in tensors]

    def slices(self, tensor: Any) -> list[Any]:
        """The micro-batches of a (local_batch, ...) tensor or structure; None gives None."""
        if tensor is None or len(self.sizes) == 1:
            return [tensor] * len(self.sizes)
        with tf.device(HOST), tf.name_scope("input/"):
            return self.cut(tensor)

    def cut(self, tensor: Any) -> list[Any]:
        """The micro-batches of a (local_batch, ...) tensor or structure, where it is."""
        parts = zip(self.offsets, self.sizes, strict=True)
        return [tf.nest.map_structure(lambda t, a=a, n=n: t[a : a + n], tensor) for a, n in parts]


class Engine:
    """Runs the actions of one batch.

    Args:
        stages: The stages, in order.
        batch: The micro-batches.
        input_keys: Keys of the model's flat inputs.
        homes: For each variable (by id) the index of the stage where it lives.
        step: Scalar int64, the global step.
        device_of: For each stage the index of its device.
        first_micro_batch: Global index of this rank's first micro-batch.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        batch: Batch,
        *,
        input_keys: Sequence[int],
        homes: dict[int, int],
        step: tf.Tensor,
        device_of: Sequence[int],
        first_micro_batch: int = 0,
    ) -> None:
        self.stages, self.batch, self.device_of = stages, batch, device_of
        self.homes, self.step, self.first = homes, step, first_micro_batch
        self.tokens: dict[int, tf.Tensor] = {}
        for stage in stages:
            with tf.device(stage.device), tf.name_scope(scope(stage.index, "forward") + "/"):
                self.tokens.setdefault(device_of[stage.index], tf.zeros([]))
        self.values: list[dict[int, tuple[Any, Any]]] = [
            {key: (parts[i], None) for key, parts in zip(input_keys, batch.inputs, strict=True)}
            for i in range(len(batch.sizes))
        ]
        self.made: dict[tuple[int, int], Made] = {}
        self.tapes: dict[tuple[int, int], tf.GradientTape | None] = {}
        self.read = self._read_all()

    def _read_all(self) -> list[tuple[Tensors, Tensors, Tensors]]:
        """The values of each stage's variables; those that live elsewhere are sent over."""
        known: dict[int, tf.Tensor] = {}
        read = []
        for stage in self.stages:
            groups: list[Tensors] = []
            for group in (stage.weights, stage.state, stage.seeds):
                for variable in group:
                    if id(variable) not in known:
                        home = self.stages[self.homes[id(variable)]]
                        with self.place(home, "forward"):
                            known[id(variable)] = compat.raw(variable).read_value()
                groups.append([known[id(v)] for v in group])
            read.append((groups[0], groups[1], groups[2]))
        return read

    def place(self, stage: Stage, word: str, index: int | None = None) -> "Place":
        """A stage's device and the name scope of one of its actions."""
        return Place(stage.device, scope(stage.index, word, index) + "/")

    def token(self, stage: Stage) -> tf.Tensor:
        """What the next action of the stage's device waits for."""
        return self.tokens[self.device_of[stage.index]]

    def done(self, stage: Stage, token: tf.Tensor) -> None:
        """Ends an action: the next one of this device waits for its token."""
        self.tokens[self.device_of[stage.index]] = tf.identity(token)

    def arguments(self, stage: Stage, i: int) -> tuple[Any, ...]:
        """What a stage's forward takes for micro-batch i, without the token."""
        pairs = [self.values[i][key] for key in stage.inputs]
        number = tf.constant(self.first + i, tf.int64)
        tensors, masks = [t for t, _ in pairs], [m for _, m in pairs]
        return (*self.read[stage.index], tensors, masks, self.step, number)

    def forward(self, k: int, i: int, *, training: bool, watch: Sequence[bool] | None) -> None:
        """Runs the forward of micro-batch i in stage k.

        Args:
            k: The stage.
            i: The micro-batch.
            training: Keras's argument.
            watch: For each input whether its gradient is wanted; None records no gradients.
        """
        stage = self.stages[k]
        with self.place(stage, "forward", i):
            arguments = self.arguments(stage, i)
            tape = None
            if watch is None:
                made = stage.forward(training)(*arguments, self.token(stage))
            else:
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(arguments[0] + [t for t, w in zip(arguments[3], watch) if w])
                    made = stage.forward(training)(*arguments, self.token(stage))
            self.done(stage, made.token)
        self.made[k, i], self.tapes[k, i] = made, tape
        self.values[i].update(
            zip(stage.outputs, zip(made.outputs, made.masks, strict=True), strict=True)
        )

    def joined(self, key: int) -> tuple[Any, Any]:
        """A tensor of all micro-batches, (local_batch, ...), with its mask or None."""
        tensors = [self.values[i][key][0] for i in range(len(self.batch.sizes))]
        masks = [self.values[i][key][1] for i in range(len(self.batch.sizes))]
        if len(tensors) == 1 or tensors[0] is None:
            return tensors[0], masks[0]
        mask = None if masks[0] is None else tf.concat(masks, 0)
        return tf.concat(tensors, 0), mask


class Place:
    """A device and an absolute name scope, entered together."""

    def __init__(self, device: str, name: str) -> None:
        self._contexts = (tf.device(device), tf.name_scope(name))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)
