"""Learning rates that follow a formula of the epoch, with momentum corrected for each change."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tf_mp import compat, world
from tf_mp.hvd.basics import rank, size
from tf_mp.hvd.live import LiveFloat

__all__ = ["LearningRateScheduleCallback", "LearningRateWarmupCallback"]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` between two epochs.

    With `staircase` the rate changes at the start of an epoch; without, at each batch, and the
    epoch is a fraction: epoch + batch / steps_per_epoch. The formula counts from `initial_lr` and
    the epoch number, never from the optimizer's present rate: training that resumes with
    `initial_epoch` goes on where it stopped.

    Args:
        initial_lr: the rate that the multiplier multiplies.
        multiplier: a function of the epoch, or a number whose power is taken.
        start_epoch: first epoch in which the rate is set.
        end_epoch: first epoch in which it is not set any more; None: never.
        staircase: whether the rate changes with the epoch only.
        momentum_correction: scales the momentum by the change of the rate for the batch at which
            it changes (Goyal et al., https://arxiv.org/abs/1706.02677, section 2.1).
        steps_per_epoch: batches in an epoch; taken from `fit` where it knows them.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Received: initial_lr=None. Expected: a learning rate.")
        self.initial_lr = float(initial_lr)
        self.multiplier = _multiplier(multiplier, start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._momentum: LiveFloat | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the steps of an epoch and makes the momentum a value that can change.

        Raises:
            ValueError: a learning rate that cannot be set.
        """
        _check_rate_can_be_set(self.model.optimizer)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if self.steps_per_epoch is None:
                warnings.warn(
                    "Received: data of unknown length and no steps_per_epoch. "
                    f"{type(self).__name__} keeps the rate of the epoch's start through its "
                    "first epoch, and counts its steps. Pass steps_per_epoch to change the rate "
                    "at each batch from the start.",
                    stacklevel=2,
                )
        if size() > 1:
            world.agree(f"steps_per_epoch of {type(self).__name__}", self.steps_per_epoch)
        self._momentum = _live_momentum(self.model) if self.momentum_correction else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch's number, which continues after a resume."""
        self.current_epoch = epoch
        self._steps_seen = 0

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate for this batch."""
        inside = self.start_epoch <= self.current_epoch
        if not inside or (self.end_epoch is not None and self.current_epoch >= self.end_epoch):
            return
        if self.steps_per_epoch and batch >= self.steps_per_epoch:
            return  # Keras looks for one batch more where it does not know the length of the data
        if self.staircase and batch == 0:
            self._set_rate(self.current_epoch)
        elif not self.staircase:
            self._set_rate(self.current_epoch + batch / (self.steps_per_epoch or math.inf))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Gives the momentum its own value back."""
        self._steps_seen = batch + 1
        if self._momentum is not None:
            self._momentum.restore()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the rate into the logs as `lr`."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = _most_steps(self._steps_seen)
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        old = _rate(self.model.optimizer)
        new = self.initial_lr * self.multiplier(epoch)
        self.model.optimizer.learning_rate = new
        if self._momentum is not None and old > 0:
            self._momentum.scale(new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr`, batch by batch.

    With e = epoch + (batch + 1) / steps_per_epoch the rate is
    `initial_lr / size * (e * (size - 1) / warmup_epochs + 1)`, so that the last batch of the last
    warm-up epoch has `initial_lr` (Goyal et al., https://arxiv.org/abs/1706.02677, section 2.2).

    Args:
        initial_lr: the rate after the warm-up.
        warmup_epochs: length of the warm-up.
        momentum_correction: as for `LearningRateScheduleCallback`.
        steps_per_epoch: as there.
        verbose: 1 prints a line on the root rank when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warmup,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the rate into the logs, and says when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch == self.warmup_epochs - 1 and rank() == 0:
            reached = _rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {reached:g}.")

    def _warmup(self, epoch: float) -> float:
        epoch += 1 / (self.steps_per_epoch or math.inf)
        return (epoch * (size() - 1) / self.warmup_epochs + 1) / size()


def _multiplier(given: Any, start_epoch: int) -> Callable[[float], float]:
    if callable(given):
        return given
    return lambda epoch: float(given ** (epoch - start_epoch))


def _most_steps(seen: int) -> int:
    return max(world.exchange(seen, what="the steps of the first epoch"))


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _check_rate_can_be_set(optimizer: Any) -> None:
    try:
        optimizer.learning_rate = _rate(optimizer)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"Received: {optimizer.name}, whose learning rate cannot be set ({error}). Expected: "
            "an optimizer with a number as learning_rate; a LearningRateSchedule has its own "
            "formula and needs no callback."
        ) from error


def _live_momentum(model: keras.Model) -> LiveFloat | None:
    """The optimizer's momentum as a value that a traced step reads anew; None without momentum.

    Keras keeps it as a plain number, which becomes a constant of the traced step. Muon's buffer
    does not hold the learning rate, so there is nothing to correct.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    momentum = getattr(optimizer, "momentum", None)
    if isinstance(optimizer, keras.optimizers.Muon) or not isinstance(momentum, float):
        return None
    if momentum == 0:
        return None
    if not isinstance(momentum, LiveFloat):
        optimizer.momentum = momentum = LiveFloat(momentum)
        if compat.is_built(model):  # an earlier fit may have traced the plain number
            model.make_train_function(force=True)
    return momentum
