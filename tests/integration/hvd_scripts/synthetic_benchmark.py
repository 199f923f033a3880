"""Horovod's synthetic benchmark in small: a step of its own on made-up images, timed."""

import argparse
import timeit

import keras
import numpy as np
import tensorflow as tf

import tf_mp.hvd as hvd  # noqa: PLR0402 (the line that a person changes)

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=2)
args = parser.parse_args()

hvd.init()

model = keras.applications.MobileNet(weights=None, input_shape=(32, 32, 3), alpha=0.25)
opt = keras.optimizers.SGD(0.01)

data = tf.random.uniform([args.batch_size, 32, 32, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=999, dtype=tf.int64)

# Horovod: (optional) compression algorithm.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(target, probs))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)


benchmark_step(first_batch=True)
img_secs = []
for _ in range(args.num_iters):
    time = timeit.timeit(lambda: benchmark_step(first_batch=False), number=1)
    img_secs.append(args.batch_size / time)
weights = np.concatenate([w.numpy().ravel() for w in model.trainable_weights])
rows = hvd.allgather(weights[None]).numpy()
assert (rows == rows[0]).all()
if hvd.rank() == 0:
    print(f"Img/sec per rank: {np.mean(img_secs):.1f}")
print(f"rank {hvd.rank()} of {hvd.size()} done", flush=True)
