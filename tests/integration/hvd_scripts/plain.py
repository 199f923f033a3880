"""Horovod's Keras guide, step by step: init, one import, scaled rate, wrapped optimizer."""

import sys

import keras
import numpy as np
import tensorflow as tf

import tf_mp.hvd as hvd  # noqa: PLR0402 (the line that a person changes)

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

rng = np.random.default_rng(hvd.rank())
images = rng.normal(size=(64, 8, 8, 1)).astype("float32")
labels = rng.integers(0, 10, 64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(64).batch(16)

model = keras.Sequential(
    [
        keras.layers.Conv2D(4, [3, 3], activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Horovod: adjust learning rate based on number of GPUs.
scaled_lr = 0.001 * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(
    opt, backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"]
)


class InStep(keras.callbacks.Callback):
    """For the test: the ranks hold the same weights after every step."""

    def on_train_batch_end(self, batch, logs=None):
        flat = np.concatenate([w.numpy().ravel() for w in self.model.trainable_weights])
        rows = hvd.allgather(flat[None]).numpy()
        assert (rows == rows[0]).all(), batch


callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),
    # Horovod: using `lr = 1.0 * hvd.size()` from the very beginning leads to worse final accuracy.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=scaled_lr, multiplier=0.1, start_epoch=3, end_epoch=4
    ),
    hvd.callbacks.EarlyStopping(monitor="loss", patience=5),
    hvd.callbacks.TerminateOnNaN(),
    InStep(),
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(f"{sys.argv[1]}/checkpoint-{{epoch}}.keras"))

verbose = 1 if hvd.rank() == 0 else 0
history = model.fit(
    dataset, steps_per_epoch=8 // hvd.size(), callbacks=callbacks, epochs=4, verbose=verbose
)
losses = [repr(value) for value in history.history["loss"]]
assert all(of_rank == losses for of_rank in hvd.allgather_object(losses))
print(f"rank {hvd.rank()} of {hvd.size()} done", flush=True)
