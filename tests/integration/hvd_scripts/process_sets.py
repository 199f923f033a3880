"""Two process sets of one rank each: every set trains for itself."""

import keras
import numpy as np
import tensorflow as tf

import tf_mp.hvd as hvd  # noqa: PLR0402 (the line that a person changes)

first, second = hvd.ProcessSet([0]), hvd.ProcessSet([1])
both = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[first, second])
own = first if first.included() else second
variable = keras.Variable(np.zeros(2, "float32"), name="weight")
gradient = tf.constant([1.0 + hvd.rank(), 2.0])


def reduced(process_set):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=process_set)
    return optimizer.reduce_gradients([gradient], [variable])[0].numpy().tolist()


assert reduced(own) == gradient.numpy().tolist()
assert reduced(hvd.global_process_set) == [1.5, 2.0]
other = second if first.included() else first
assert reduced(other) == gradient.numpy().tolist()  # not of that set: nothing is reduced
print(f"rank {hvd.rank()} of {hvd.size()} done", flush=True)
