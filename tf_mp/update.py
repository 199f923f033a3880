"""The optimizer step, stage by stage, each on its stage's device.

Keras's `apply` does all of its arithmetic on device 0: gradients, weights and slots of the other
stages travel there and back. Here clipping, weight decay, the update, gradient accumulation,
moving averages and constraints of a stage's variables run under that stage's device; only scalars
cross: the step counter, the learning rate, the squared norm for `global_clipnorm`, and whether
the gradients are finite for a `LossScaleOptimizer`.

The arithmetic is Keras's own (`update_step` of the optimizer at hand). What an optimizer keeps
once for all variables (its step counter, Nadam's running product) is read once, lent to every
stage as a local value, and moved once.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tf_mp import compat, slots
from tf_mp.opnames import scope as scope_name

__all__ = ["Share", "apply", "check"]


@dataclasses.dataclass(eq=False)
class Share:
    """The variables of one stage with their gradients.

    Attributes:
        index: The stage.
        device: Its device.
        gradients: One a variable, of its shape; `tf.IndexedSlices` where Keras gives those; None
            where the loss does not depend on it.
        variables: The trainable Keras variables.
    """

    index: int
    device: str
    gradients: list[Any]
    variables: list[keras.Variable]


def check(optimizer: Any) -> None:
    """Refuses an optimizer whose step is not made of one `update_step` a variable.

    Raises:
        ValueError: naming the optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(inner, keras.optimizers.Optimizer) or isinstance(
        inner, keras.optimizers.MultiOptimizer
    ):
        raise ValueError(
            f"The optimizer {type(inner).__name__} cannot step stage by stage. Received: an "
            "optimizer that holds others. Expected: one of keras.optimizers, possibly within "
            "LossScaleOptimizer and hvd.DistributedOptimizer."
        )


def apply(optimizer: Any, shares: Sequence[Share]) -> None:
    """One step of a built optimizer.

    Args:
        optimizer: A Keras optimizer, or a `LossScaleOptimizer` around one.
        shares: The stages, with gradients that are already reduced over ranks.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        _apply_scaled(optimizer, shares)
    else:
        _Step(optimizer, shares[0]).run(shares, None)


def _apply_scaled(optimizer: Any, shares: Sequence[Share]) -> None:
    """As Keras does it: skip the step and halve the scale unless all gradients are finite."""
    flags = []
    for share in shares:
        with _place(share):
            present = [_values(g) for g in share.gradients if g is not None]
            flags.append(
                tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in present])
                if present
                else tf.constant(True)
            )
    with _place(shares[0]):
        finite = tf.reduce_all(tf.stack(flags))
        scale = compat.raw(optimizer.dynamic_scale).read_value()
    scaled = []
    for share in shares:
        with _place(share):
            local = tf.identity(scale)
            gradients = [_map(g, lambda t, s=local: t / tf.cast(s, t.dtype))
                         for g in share.gradients]  # fmt: skip
        scaled.append(dataclasses.replace(share, gradients=gradients))
    _Step(optimizer.inner_optimizer, shares[0]).run(scaled, finite)
    with _place(shares[0]):
        _move_scale(optimizer, finite)


def _move_scale(optimizer: Any, finite: tf.Tensor) -> None:
    """Doubles the scale after enough finite steps, halves it after one that was not."""
    counter, dynamic = compat.raw(optimizer.step_counter), compat.raw(optimizer.dynamic_scale)
    grown = tf.equal(counter, optimizer.dynamic_growth_steps - 1)
    restart = tf.logical_or(grown, tf.logical_not(finite))
    count = tf.where(restart, tf.zeros_like(counter), counter + 1)
    factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
    counter.assign(tf.cast(count, counter.dtype))
    dynamic.assign(dynamic * tf.cast(factor, dynamic.dtype))


class _Step:
    """One step of a plain optimizer, under an optional scalar condition."""

    def __init__(self, optimizer: Any, first: Share) -> None:
        self.optimizer = optimizer
        self.first = first
        self.shared = slots.shared(optimizer)
        self.moved: dict[int, Any] = {}
        every = optimizer.gradient_accumulation_steps
        with _place(first):
            self.start = {id(v): compat.raw(v).read_value() for v in self.shared}
            count = self.start[id(optimizer._iterations)]
            self.is_update = None if not every else tf.equal((count + 1) % every, 0)

    def run(self, shares: Sequence[Share], condition: Any) -> None:
        shares = [self._prepare(share) for share in shares]
        clipped = self._clip(shares, [self._accumulated(share) for share in shares])
        for share, gradients in zip(shares, clipped, strict=True):
            with _place(share), tf.name_scope(self.optimizer.name):
                _when(condition, lambda s=share, g=gradients: self._stage(s, g))
        with _place(self.first):
            _when(condition, self._finish)

    def _prepare(self, share: Share) -> Share:
        """Drops variables without gradient, undoes `loss_scale_factor`, as Keras's `apply`."""
        both = zip(share.gradients, share.variables, strict=True)
        pairs = [(g, v) for g, v in both if g is not None]
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        factor = self.optimizer.loss_scale_factor
        with _place(share):
            if factor is not None:
                gradients = [_map(g, lambda t: t / factor) for g in gradients]
        return dataclasses.replace(share, gradients=gradients, variables=variables)

    def _slots(self, slots: Sequence[Any], share: Share) -> list[Any]:
        return [slots[self.optimizer._get_variable_index(v)] for v in share.variables]

    def _accumulated(self, share: Share) -> list[Any]:
        """The gradients to step with: with accumulation, the mean of those of k steps."""
        every = self.optimizer.gradient_accumulation_steps
        if not every:
            return share.gradients
        with _place(share):
            sums = self._slots(self.optimizer._accumulated_gradients, share)
            pairs = zip(share.gradients, sums, strict=True)
            return [(tf.convert_to_tensor(g) + compat.raw(acc)) / every for g, acc in pairs]

    def _clip(self, shares: Sequence[Share], gradients: list[list[Any]]) -> list[list[Any]]:
        norm = None
        if self.optimizer.global_clipnorm:
            squares = []
            for share, own in zip(shares, gradients, strict=True):
                with _place(share):
                    parts = [tf.reduce_sum(tf.square(tf.convert_to_tensor(g))) for g in own]
                    squares += [tf.add_n(parts)] if parts else []
            norm = tf.sqrt(tf.add_n(squares)) if squares else None
        clipped = []
        for share, own in zip(shares, gradients, strict=True):
            with _place(share):
                clipped.append(self._clip_stage(own, norm))
        return clipped

    def _clip_stage(self, gradients: list[Any], norm: Any) -> list[Any]:
        if not self.optimizer.global_clipnorm:
            return self.optimizer._clip_gradients(gradients)
        if norm is None:
            return gradients
        limit = self.optimizer.global_clipnorm
        # Keras's formula: a norm that is not finite must make every gradient NaN.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [_map(g, lambda t: t * tf.cast(factor, t.dtype)) for g in gradients]

    def _stage(self, share: Share, gradients: list[Any]) -> None:
        if self.is_update is None:
            self._update(share, gradients)
        else:
            tf.cond(
                self.is_update,
                lambda: self._update_and_clear(share, gradients),
                lambda: self._accumulate(share),
            )
        if self.optimizer.use_ema:
            self._average(share)
        for variable in share.variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def _update(self, share: Share, gradients: list[Any]) -> None:
        local = [(v, tf.identity(self.start[id(v)])) for v in self.shared]
        with keras.StatelessScope(local) as scope, _lend(self.optimizer, scope, self.start):
            self.optimizer._apply_weight_decay(share.variables)
            with compat.one_replica(self.optimizer):
                self.optimizer._backend_update_step(
                    gradients, share.variables, self.optimizer.learning_rate
                )
            for variable, lent in local:
                value = scope.get_current_value(variable)
                if value is not lent:
                    self.moved.setdefault(id(variable), value)

    def _update_and_clear(self, share: Share, gradients: list[Any]) -> int:
        self._update(share, gradients)
        for slot in self._slots(self.optimizer._accumulated_gradients, share):
            compat.raw(slot).assign(tf.zeros_like(compat.raw(slot)))
        return 0

    def _accumulate(self, share: Share) -> int:
        slots = self._slots(self.optimizer._accumulated_gradients, share)
        for gradient, slot in zip(share.gradients, slots, strict=True):
            compat.raw(slot).assign_add(tf.convert_to_tensor(gradient))
        return 0

    def _average(self, share: Share) -> None:
        """Keras's exponential moving average of the weights, and its overwriting."""
        opt = self.optimizer
        every = opt.gradient_accumulation_steps
        count = self.start[id(opt._iterations)]
        count = count // every if every else count
        averages = self._slots(opt._model_variables_moving_average, share)
        for variable, average in zip(share.variables, averages, strict=True):
            if average is None:
                continue
            value, target = compat.raw(variable), compat.raw(average)
            momentum = tf.cast(tf.not_equal(count, 0), value.dtype) * opt.ema_momentum
            target.assign(momentum * target + (1 - momentum) * value)
            if opt.ema_overwrite_frequency:
                due = tf.equal((count + 1) % opt.ema_overwrite_frequency, 0)
                value.assign(tf.where(due, target.read_value(), value.read_value()))

    def _finish(self) -> None:
        """Moves once what the optimizer keeps for all variables."""
        for variable in self.shared:
            if id(variable) in self.moved:
                compat.raw(variable).assign(self.moved[id(variable)])
        compat.raw(self.optimizer._iterations).assign_add(1)


@contextlib.contextmanager
def _lend(optimizer: Any, scope: Any, start: dict[int, Any]) -> Iterator[None]:
    """Turns assignments to shared variables into updates of the stateless scope."""
    original = optimizer.assign

    def assign(variable: Any, value: Any) -> None:
        if id(variable) in start:
            scope.add_update((variable, ops.cast(value, variable.dtype)))
        else:
            original(variable, value)

    object.__setattr__(optimizer, "assign", assign)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "assign")


@contextlib.contextmanager
def _place(share: Share) -> Iterator[None]:
    with tf.device(share.device), tf.name_scope(scope_name(share.index, "update") + "/"):
        yield


def _when(condition: Any, body: Any) -> None:
    if condition is None:
        body()
    else:
        tf.cond(condition, lambda: (body(), 0)[1], lambda: 0)


def _map(gradient: Any, function: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else function(gradient)


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
