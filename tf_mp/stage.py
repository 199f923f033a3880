"""A stage: a run of operations as a pure function on one device.

Weights and state go in and come out, nothing is assigned, so that micro-batches cannot disturb
each other. Each function is traced once for each shape of a micro-batch and called for all of
them.

**Order.** A schedule is enforced by a *token*, a scalar that each action takes and gives. Every
tensor that an action reads is an identity that waits for the token, and the token that it gives
waits for every tensor that it makes. Edges on tensors, not on calls: TensorFlow inlines the
functions, and an edge from the call of a pure function then orders nothing.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, randomness
from tf_mp.graph import Operation, Values

__all__ = ["LOOPS", "Made", "Stage", "gate", "loops_in_turn", "seal"]

Tensors = list[Any]  # entries may be None: a gradient or a mask that does not exist


@dataclasses.dataclass
class Made:
    """What a forward makes: tensors, their masks, new state, the sum of `add_loss`, a token."""

    outputs: Tensors
    masks: Tensors
    state: Tensors
    loss: Any
    token: tf.Tensor


def gate(tensors: Sequence[Any], token: tf.Tensor) -> Tensors:
    """Identities of the tensors that wait for the token."""
    with tf.control_dependencies([token]):
        return [None if tensor is None else _identity(tensor) for tensor in tensors]


def seal(tensors: Sequence[Any], token: tf.Tensor) -> tf.Tensor:
    """A token that waits for all of the tensors (or operations) and for the token before it."""
    dense = [part for tensor in tensors if tensor is not None for part in _parts(tensor)]
    with tf.control_dependencies([*dense, token]):
        return tf.zeros([], tf.float32)


#: TensorFlow's operations that loop.
LOOPS = {"While", "StatelessWhile"}


@contextlib.contextmanager
def loops_in_turn(token: tf.Tensor) -> Iterator[list[tf.Operation]]:
    """Loops that are made within it wait for the token; yields them, filled in at the end.

    TensorFlow makes small operations of a loop before the graph runs. Those that count iterations,
    or that choose by the mask, read no tensor that waits, and a result that only the backward
    needs is no output of the stage: so the loop itself has to wait, and has to be waited for.
    """
    before, loops = _num_made(), list[tf.Operation]()
    yield loops
    loops += [operation for operation in _made_since(before) if operation.type in LOOPS]
    for loop in loops:
        compat.wait_for(loop, token)


def _identity(tensor: Any) -> Any:
    return tf.nest.map_structure(tf.identity, tensor, expand_composites=True)


def _parts(tensor: Any) -> list[tf.Tensor]:
    return tf.nest.flatten(tensor, expand_composites=True)


@dataclasses.dataclass(eq=False)
class Stage:
    """Some operations of a model, on one device.

    Attributes:
        index: Position in the pipeline, from 0.
        device: Where all of it runs, e.g. `"/device:GPU:1"`.
        operations: Its operations, in order.
        inputs: Keys of the tensors that it takes from earlier stages or from the model's input.
        outputs: Keys of the tensors that later stages or the model's caller take from it.
        ordinals: For each seed generator of the model (by the id of its variable) its index.
        eager: Run without `tf.function`, one action after another.
    """

    index: int
    device: str
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ordinals: dict[int, int]
    eager: bool = False

    def __post_init__(self) -> None:
        self.variables: list[keras.Variable] = []
        for operation in self.operations:
            known = {id(v) for v in self.variables}
            self.variables += [v for v in operation.variables if id(v) not in known]
        self.seeds = [v for v in self.variables if id(v) in self.ordinals]
        self.reset()

    def reset(self) -> None:
        """Forgets all traces: after `compile`, which may follow a change of `trainable`."""
        seeds = {id(v) for v in self.seeds}
        self.weights = [v for v in self.variables if v.trainable]
        self.state = [v for v in self.variables if not v.trainable and id(v) not in seeds]
        self._functions: dict[Any, Callable[..., Any]] = {}
        #: Whether a layer loops (LSTM, `tf.while_loop`); known after the first trace.
        self.loops: bool | None = None
        #: Which of `state` the forward changes; known after the first trace with training=True.
        self.changed: list[int] | None = None

    def function(self, name: str, body: Callable[..., Any]) -> Any:
        """The body as a function on this stage's device, traced once for each shape.

        The backward that TensorFlow makes for a function has no device of its own, and a loop in
        it would keep its state on device 0. So a stage with a loop is no function: it becomes
        part of the step's graph, where each of its operations has its device.
        """
        if self.eager or self.loops:
            return self._on_device(body)
        if name not in self._functions:
            self._functions[name] = tf.function(self._on_device(body), autograph=False)
        return self._functions[name]

    def _on_device(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def placed(*args: Any) -> Any:
            with tf.device(self.device):
                return body(*args)

        return placed

    def wanted(self, needs_gradient: set[int]) -> list[bool]:
        """For each input whether its gradient is needed."""
        return [key in needs_gradient for key in self.inputs]

    def forward(self, training: bool) -> Callable[..., Made]:
        """The forward: `(weights, state, seeds, inputs, masks, step, micro_batch, token)`."""

        def body(*args: Any) -> tuple[Any, ...]:
            return self._forward(training, *args)

        def call(*args: Any) -> Made:
            run = self.function(f"forward_{training}", body)
            if self.loops is None and not self.eager:
                self.loops = _loops(run.get_concrete_function(*args).graph)
                run = self.function(f"forward_{training}", body)
            outputs, masks, state, loss, token = run(*args)
            return Made(outputs, masks, state, loss, token)

        return call

    def _forward(
        self,
        training: bool,
        weights: Tensors,
        state: Tensors,
        seeds: Tensors,
        inputs: Tensors,
        masks: Tensors,
        step: tf.Tensor,
        micro_batch: tf.Tensor,
        token: tf.Tensor,
    ) -> tuple[Any, ...]:
        weights, state, inputs = gate(weights, token), gate(state, token), gate(inputs, token)
        masks, seeds = gate(masks, token), gate(seeds, token)
        ordinals = [self.ordinals[id(v)] for v in self.seeds]
        keys = randomness.keys(seeds, ordinals, step, micro_batch)
        given = [
            *zip(self.weights, weights, strict=True),
            *zip(self.state, state, strict=True),
            *zip(self.seeds, keys, strict=True),
        ]
        values: Values = {}
        for key, tensor, mask in zip(self.inputs, inputs, masks, strict=True):
            values[key] = _with_mask(tensor, mask)
        with loops_in_turn(token) as loops, keras.StatelessScope(given, True) as scope:
            for operation in self.operations:
                before = _num_made()
                operation.run(values, training)
                _refuse_unknown_state(operation, scope, given)
                if training:
                    _refuse_stateful_draws(operation, before)
        outputs = [values[key] for key in self.outputs]
        out_masks = [None if tensor is None else compat.get_mask(tensor) for tensor in outputs]
        new = [scope.get_current_value(v) for v in self.state]
        if training:
            pairs = zip(new, state, strict=True)
            self.changed = [j for j, (after, before) in enumerate(pairs) if after is not before]
        moved = [new[j] for j in self.changed] if training and self.changed else []
        loss = _total(scope.losses)
        token = seal([*outputs, *out_masks, *moved, loss, *loops], token)
        return outputs, out_masks, moved, loss, token

    def finish(self) -> Callable[..., tuple[Tensors, Tensors, tf.Tensor]]:
        """The end of a backward: `(sums, gradients, input_gradients, token)`.

        Adds the gradients to the sums so far (an empty list at the first micro-batch); gives the
        new sums, the input gradients and a token. `IndexedSlices` are joined, not made dense.
        """

        def body(
            sums: Tensors, gradients: Tensors, input_gradients: Tensors, token: tf.Tensor
        ) -> tuple[Tensors, Tensors, tf.Tensor]:
            with tf.control_dependencies([token]):
                new = [_identity(g) for g in gradients] if not sums else list(
                    map(_add, sums, gradients)
                )  # fmt: skip
                inner = [None if g is None else _identity(g) for g in input_gradients]
            return new, inner, seal([*new, *inner], token)

        return self.function("finish", body)


def _loops(graph: Any) -> bool:
    return any(operation.type in LOOPS for operation in graph.get_operations())


def _add(total: Any, gradient: Any) -> Any:
    if isinstance(total, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([total.values, gradient.values], 0),
            tf.concat([total.indices, gradient.indices], 0),
            total.dense_shape,
        )
    return tf.add(tf.convert_to_tensor(total), tf.convert_to_tensor(gradient))


def _with_mask(tensor: Any, mask: Any) -> Any:
    if tensor is not None and mask is not None:
        tensor = tf.identity(tensor)
        compat.set_mask(tensor, mask)
    return tensor


def _total(losses: Sequence[Any]) -> Any:
    """The sum of what `add_loss` and activity regularisers gave, or None."""
    parts = [tf.reduce_sum(tf.cast(loss, keras.config.floatx())) for loss in losses]
    return tf.add_n(parts) if parts else None


#: TensorFlow's operations that draw from a generator of their own.
_STATEFUL_DRAWS = {
    "Multinomial",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


def _num_made() -> int:
    """Operations in the graph that is being made; 0 when running eagerly."""
    return len(_made_since(0))


def _made_since(before: int) -> list[tf.Operation]:
    """The operations of the graph that is being made, without the first ones."""
    if tf.executing_eagerly():
        return []
    return tf.compat.v1.get_default_graph().get_operations()[before:]


def _refuse_stateful_draws(operation: Operation, before: int) -> None:
    """Fails where a layer draws from stateful `tf.random`: its draws would follow no key."""
    kinds = sorted({new.type for new in _made_since(before)} & _STATEFUL_DRAWS)
    if kinds:
        raise ValueError(
            f"The layer {operation.name!r} cannot be split. Received: a call that draws from "
            f"stateful tf.random ({', '.join(kinds)}). Expected: keras.random with a "
            "keras.random.SeedGenerator of the layer, passed as `seed=`."
        )


def _refuse_unknown_state(operation: Operation, scope: Any, given: list[Any]) -> None:
    """Fails where a layer changed state that does not belong to it (it would be lost)."""
    known = {id(variable) for variable, _ in given}
    if any(key not in known for key in scope.state_mapping):
        raise ValueError(
            f"The layer {operation.name!r} cannot be split. Received: a call that changes a "
            "variable which is not the layer's own, for example the seed of keras.random when "
            "no seed is given (it would repeat the same noise in every micro-batch). Expected: "
            "`self.seed = keras.random.SeedGenerator(...)` in the layer, passed as `seed=`."
        )
