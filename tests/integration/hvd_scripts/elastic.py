"""Horovod's elastic guide; one rank kills itself, the other goes on, a new one joins.

Argument: a folder. The file `killed` in it says that the kill is over, `alone` that the rank that
was left has taken a step by itself: only then the test offers a place for a new one.
"""

import hashlib
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_mp.hvd as hvd  # noqa: PLR0402 (the line that a person changes)

STEPS, EPOCHS, PATIENCE_S = 4, 3, 120
killed, alone = (pathlib.Path(sys.argv[1]) / name for name in ("killed", "alone"))

hvd.init()
keras.utils.set_random_seed(hvd.rank() + 7)
x = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).repeat().batch(8)
layers = [keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size())), loss="mse")
model.build((None, 3))


def on_state_reset():
    model.optimizer.learning_rate = 0.01 * hvd.size()


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])


class Events(keras.callbacks.Callback):
    """Kills one rank in the middle of the second epoch; the one left waits for another."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"epoch {state.epoch} batch {batch} size {hvd.size()}", flush=True)
        if hvd.size() == 2 and state.epoch == 1 and batch == 1 and not killed.exists():
            if hvd.rank() == 1:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)
        if hvd.size() == 1:
            alone.touch()
        deadline = time.monotonic() + PATIENCE_S
        while hvd.size() == 1 and killed.exists() and time.monotonic() < deadline:
            time.sleep(0.5)
            state.check_host_updates()


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset,
        steps_per_epoch=STEPS,
        epochs=EPOCHS - state.epoch,
        verbose=0,
        callbacks=[
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
            Events(),
        ],
    )


train(state)
weights = np.concatenate([v.numpy().ravel() for v in model.variables])
digest = hashlib.sha256(weights.tobytes()).hexdigest()
print(f"end: rank {hvd.rank()} size {hvd.size()} epoch {state.epoch} weights {digest}", flush=True)
