"""Three ranks in two process sets, of one rank and of two: every set trains for itself."""

import keras
import numpy as np
import tensorflow as tf

import tf_mp.hvd as hvd  # noqa: PLR0402 (the line that a person changes)

alone, pair = hvd.ProcessSet([0]), hvd.ProcessSet([1, 2])
hvd.init(process_sets=[alone, pair])
variable = keras.Variable(np.zeros(2, "float32"), name="weight")
gradient = tf.constant([1.0 + hvd.rank(), 2.0])


def reduced(process_set):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=process_set)
    return optimizer.reduce_gradients([gradient], [variable])[0].numpy().tolist()


own, other = (alone, pair) if alone.included() else (pair, alone)
assert reduced(own) == ([1.0, 2.0] if hvd.rank() == 0 else [2.5, 2.0]), reduced(own)
assert reduced(hvd.global_process_set) == [2.0, 2.0]
assert reduced(other) == gradient.numpy().tolist()  # not of that set: nothing is reduced
print(f"rank {hvd.rank()} of {hvd.size()} done", flush=True)
