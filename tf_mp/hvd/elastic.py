"""Training that goes on while ranks come and go, under Horovod's elastic launcher."""

import functools
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as _horovod
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from tf_mp import world
from tf_mp.hvd import variables as _variables
from tf_mp.hvd.collectives import broadcast_variables

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates `func(state, ...)` so that it starts again, in step, when the ranks change.

    A rank that is lost fails a collective of the others: they go back to the last commit and start
    `func` again without it. A rank that joins interrupts them at the next commit.
    """

    @functools.wraps(func)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except (tf.errors.OpError, ValueError) as error:
            if _is_lost_rank(error):
                raise HorovodInternalError(error) from error
            raise

    return run_fn(guarded, _reset)


def listener() -> Any:
    """A state for `run` that keeps nothing and only hears of ranks that come and go."""
    return ObjectState(bcast_object=_horovod.broadcast_object, get_rank=_horovod.rank)


def _is_lost_rank(error: Exception) -> bool:
    """Whether a failed step failed in a collective, for a rank is gone or Horovod stopped."""
    text = str(error)
    in_collective = isinstance(error, tf.errors.OpError) and "Horovod" in text
    return in_collective or "Horovod has been shut down" in text


def _reset() -> None:
    _horovod.shutdown()
    world.prepare_environment()
    _horovod.init()


class KerasState(ObjectState):
    """A model, its optimizer and anything else that all ranks hold in common.

    Args:
        model: a built Keras model.
        optimizer: its optimizer; the compiled one by default.
        **kwargs: more values, which become attributes: `batch=0, epoch=0`, for instance.

    Raises:
        ValueError: a model that is not built.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                "Received: a model that is not built. Expected: a model with weights; call "
                "model.build(input_shape) first."
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else model.optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        self._save_model()
        super().__init__(
            bcast_object=_horovod.broadcast_object, get_rank=_horovod.rank, **kwargs
        )

    def save(self) -> None:
        """Keeps the present values in memory, to come back to."""
        self._save_model()
        super().save()

    def restore(self) -> None:
        """Goes back to the values of the last `save`."""
        for variable, value in zip(self._variables(), self._saved, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Gives every rank the values of rank 0, and keeps them."""
        broadcast_variables(self._variables(), root_rank=0)
        self._save_model()
        super().sync()

    def _variables(self) -> list[Any]:
        return _variables.flat_variables(self.model, self.optimizer)

    def _save_model(self) -> None:
        self._saved = [keras.ops.convert_to_numpy(v).copy() for v in self._variables()]


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state every few batches and at the end of each epoch.

    Args:
        state: what `run` passes to the training function.
        batches_per_commit: batches between two commits.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from here, on old and new ranks alike."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits when it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.commit()

    def commit(self) -> None:
        """Keeps the state and looks whether ranks come or go."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps `state.batch`, and shortens the first epoch after a restart by what was done.

    Put it before callbacks that stop the training, for it ends that epoch through
    `model.stop_training`.

    Args:
        state: what `run` passes to the training function.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._done_before = 0
        self._ends_epoch_early = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers how much of this epoch was done before a restart."""
        self._done_before = self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes the batch into the state, and ends an epoch that is complete."""
        self.state.batch = self._done_before + batch
        steps = self.params.get("steps")
        complete = steps and batch + 1 < steps <= self.state.batch + 1
        if complete and not self.model.stop_training:
            self.model.stop_training = self._ends_epoch_early = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Starts the next epoch at its first batch."""
        self.state.batch = 0
        if self._ends_epoch_early:
            self.model.stop_training = self._ends_epoch_early = False


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch`: the epochs that are complete, over all restarts.

    Args:
        state: what `run` passes to the training function.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts from what was complete before; Keras counts from 0 again."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts one more epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
