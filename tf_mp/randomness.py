"""Random draws that do not depend on how the work was spread.

The state of a `SeedGenerator` in a forward is a function of its own seed, the global step, the
global index of the micro-batch and its ordinal in the model; the calls within a layer count on
from there. So dropout gives the same masks for every number of stages and ranks, and when a
forward is done again in the backward (`recompute`), and after a resume.
"""

from collections.abc import Sequence

import tensorflow as tf

__all__ = ["keys"]


def keys(
    seeds: Sequence[tf.Tensor], ordinals: Sequence[int], step: tf.Tensor, micro_batch: tf.Tensor
) -> list[tf.Tensor]:
    """The state of each seed generator for one micro-batch of one step.

    Args:
        seeds: For each generator its variable's value, (2,) of Keras's seed dtype.
        ordinals: For each generator its index among those of the whole model.
        step: Scalar int64, the global step.
        micro_batch: Scalar int64, the index of the micro-batch among those of all ranks.

    Returns:
        For each generator the state to start from, (2,) of its dtype.
    """
    if not seeds:
        return []
    # Philox, counter based (Salmon et al. 2011): the same numbers on every kind of device.
    bits = tf.random.stateless_uniform(
        [max(ordinals) + 1, 2],
        seed=tf.stack([tf.cast(step, tf.int64), tf.cast(micro_batch, tf.int64)]),
        minval=None,
        maxval=None,
        dtype=tf.uint32,
        alg="philox",
    )
    return [
        tf.cast(tf.bitwise.bitwise_xor(tf.cast(seed, tf.uint32), bits[ordinal]), seed.dtype)
        for seed, ordinal in zip(seeds, ordinals, strict=True)
    ]
