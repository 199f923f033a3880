"""All ranks start from the root rank's values, and keep the same statistics."""

import warnings
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, world
from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import size
from tf_mp.hvd.collectives import broadcast_variables
from tf_mp.hvd.optimizer import distributed_in
from tf_mp.hvd.state import average_state

__all__ = ["BroadcastGlobalVariablesCallback"]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives every rank the root rank's model and optimizer before the first step.

    A model or optimizer that is first built by the first batch gets the values then, before that
    step runs. Statistics that layers keep (batch normalisation) differ by rank while an epoch
    runs; at its end, before validation and before a checkpoint of the epoch, each rank
    gets their mean.

    Args:
        root_rank: the rank whose values are sent.
        device: device of the broadcast; each variable's own by default.
        local_variables: a variable, or several, that each rank keeps for itself.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        self._state_is_common = False
        for variable in _as_list(local_variables):
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Makes a variable the rank's own: it is not broadcast."""
        self._local.add(_variables.key(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts, if everything is built, or leaves it for the first batch."""
        self.broadcast_done = False
        if size() == 1:
            self.broadcast_done = True
            return
        world.agree("the steps of an epoch", self.params.get("steps"))
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and distributed_in(optimizer) is None:
            warnings.warn(
                f"Received: the optimizer {optimizer.name}, which is not wrapped, on {size()} "
                "ranks: its gradients stay this rank's own. Wrap it in hvd.DistributedOptimizer "
                "before compile, unless the model's own train_step averages them.",
                stacklevel=2,
            )
        built = compat.is_built(self.model)
        if built and optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if built:
            self._broadcast()
        else:
            self._broadcast_when_data_comes()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first batch what only running it could build."""
        if not self.broadcast_done:
            self._broadcast()
        self._state_is_common = False
        steps = self.params.get("steps")
        if steps is not None and batch + 1 >= steps:
            self._average_state()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Gives all ranks the same statistics before the callbacks after this one save them."""
        self._average_state()

    def _broadcast_when_data_comes(self) -> None:
        """Builds the model from the first batch's shapes, broadcasts, then lets the step run."""
        model, step = self.model, self.model.train_function

        def first_step(iterator: Any) -> Any:
            model.train_function = step
            if compat.build_from(model, iterator):
                self._broadcast()
            return step(iterator)

        model.train_function = first_step

    def _broadcast(self) -> None:
        listed = _variables.flat_variables(self.model)
        common = [v for v in listed if _variables.key(v) not in self._local]
        with tf.device(self.device or None):
            broadcast_variables(common, self.root_rank)
        self.broadcast_done = True

    def _average_state(self) -> None:
        if not self._state_is_common:
            average_state(self.model, self._local)
        self._state_is_common = True


def _as_list(variables: Any) -> list[Any]:
    """The local variables as a list.

    Raises:
        ValueError: something that is no variable.
    """
    kinds = (keras.Variable, tf.Variable)
    listed = [variables] if isinstance(variables, kinds) else list(variables or [])
    if not all(isinstance(variable, kinds) for variable in listed):
        raise ValueError(
            f"Received: local_variables={listed!r}. Expected: Keras or TensorFlow variables."
        )
    return listed
