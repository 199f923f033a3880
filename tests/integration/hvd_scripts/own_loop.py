"""Horovod's guide for own training loops: the tape, and variables broadcast after step one."""

import keras
import numpy as np
import tensorflow as tf

import tf_mp.hvd as hvd  # noqa: PLR0402 (the line that a person changes)

hvd.init()

keras.utils.set_random_seed(hvd.rank())
rng = np.random.default_rng(hvd.rank())
images = rng.normal(size=(64, 12)).astype("float32")
labels = rng.integers(0, 10, 64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(16)

mnist_model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(10, "softmax")])
loss = keras.losses.SparseCategoricalCrossentropy()
opt = keras.optimizers.Adam(0.001 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables))

    # Horovod: broadcast initial variable states from rank 0 to all other processes. This is done
    # after the first gradient step to ensure optimizer initialization.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)

    return loss_value


for batch, (images, labels) in enumerate(dataset.take(12 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    flat = np.concatenate([w.numpy().ravel() for w in mnist_model.variables + opt.variables])
    rows = hvd.allgather(flat[None]).numpy()
    assert (rows == rows[0]).all(), batch
    if batch % 2 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {float(loss_value):.6f}")
print(f"rank {hvd.rank()} of {hvd.size()} done", flush=True)
