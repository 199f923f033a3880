"""Statistics that layers keep while they train, the same on all ranks."""

from collections.abc import Collection

import horovod.tensorflow as _horovod
import keras
import tensorflow as tf

from tf_mp import compat
from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import size

__all__ = ["average_state"]


def average_state(model: keras.Model, local: Collection[int] = ()) -> None:
    """Gives every rank the mean over ranks of what the model's layers keep besides weights.

    That is the floating state of batch normalisation and its kind; frozen weights are not state,
    and counters and seeds stay as they are. Every rank must call it.

    Args:
        model: a built Keras model.
        local: keys of variables that each rank keeps for itself.
    """
    found = {_variables.key(v): v for v in compat.floating_state(model)}
    common = [variable for key, variable in found.items() if key not in local]
    if size() == 1 or not common:
        return

    @tf.function(autograph=False)
    def run() -> None:
        for variable in common:
            tensor = _variables.tensor_of(variable)
            name = _variables.operation_name("state", [_variables.path(variable)])
            with tf.device(tensor.device):
                mean = _horovod.allreduce(
                    tensor.read_value(), op=_horovod.Average, name=name, ignore_name_scope=True
                )
                tensor.assign(mean)

    run()
