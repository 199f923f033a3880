"""`SyncBatchNormalization`: mean and variance of the batches of all ranks together."""

from typing import Any

import horovod.tensorflow as _horovod
import keras
import tensorflow as tf

from tf_mp import compat
from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import size

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras's `BatchNormalization` whose training statistics come from all ranks.

    It is saved as a plain `BatchNormalization(synchronized=True)`, which loads anywhere. Ranks may
    have batches of different sizes: sums are added up, not means averaged.

    Args:
        fused: accepted for Horovod's sake: only False.
        **kwargs: as for `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is not False.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError(
                f"Received: fused={fused}. Expected: False; a fused kernel cannot see other ranks."
            )
        super().__init__(**{**kwargs, "synchronized": True})

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """Mean and variance (channels,) over the samples of all ranks that no mask leaves out."""
        if size() == 1:
            return super()._moments(inputs, mask)
        values = tf.cast(inputs, tf.float32)
        channels = self.axis % values.shape.rank
        axes = [axis for axis in range(values.shape.rank) if axis != channels]
        weights = tf.ones_like(values)
        if mask is not None:
            weights = tf.broadcast_to(tf.cast(mask, tf.float32)[..., None], tf.shape(values))
        mine = tf.stack(
            [
                tf.reduce_sum(weights, axes),
                tf.reduce_sum(weights * values, axes),
                tf.reduce_sum(weights * tf.square(values), axes),
            ]
        )
        count, total, squares = tf.unstack(_sum_over_ranks(mine, self.path))
        mean = total / tf.maximum(count, 1)
        variance = tf.maximum(squares / tf.maximum(count, 1) - tf.square(mean), 0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _sum_over_ranks(value: tf.Tensor, path: str) -> tf.Tensor:
    """The sum of a value of each rank; its gradient is the sum of the ranks' gradients."""

    def reduce(tensor: tf.Tensor, kind: str) -> tf.Tensor:
        name = _variables.operation_name(kind, [path])
        return _horovod.allreduce(
            tensor, op=_horovod.Sum, name=name, ignore_name_scope=True
        )

    @tf.custom_gradient
    def summed(tensor: tf.Tensor) -> Any:
        return reduce(tensor, "batch_norm"), lambda upstream: reduce(upstream, "batch_norm_grad")

    return summed(value)


# Keras writes a layer's weights under the name of its class, and a file must load without Horovod.
SyncBatchNormalization.__name__ = "BatchNormalization"
compat.serialise_as(SyncBatchNormalization, keras.layers.BatchNormalization)
