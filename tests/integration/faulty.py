"""A small split and replicated training to which one fault happens, named on the command line.

    faulty.py FAULT RANK FOLDER

At its fifth step the given rank does what FAULT says.
"""

import os
import signal
import sys
import time

import tf_mp

# isort: split
import keras
import numpy as np
import tensorflow as tf

from tf_mp import checkpoint, data, evaluation, stop, training, world

FAULT, RANK, FOLDER = sys.argv[1], int(sys.argv[2]), sys.argv[3]
STEPS = 2000 if FAULT == "stopped from outside" else 40


class Fault(keras.callbacks.Callback):
    """Happens at the end of the fifth step."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"step {batch + 1} of rank {world.current().rank}", flush=True)
        time.sleep(0.05)
        if batch != 4 or not here():
            return
        print(f"FAULT {time.time():.2f}", flush=True)
        if FAULT == "exception":
            raise KeyError("the cause")
        if FAULT == "exit 0":
            os._exit(0)
        if FAULT == "sys.exit":
            sys.exit(3)
        if FAULT == "nan":
            self.model.layers[-1].kernel.assign(self.model.layers[-1].kernel * np.nan)
        if FAULT.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, FAULT))


class Early(keras.callbacks.Callback):
    """One rank alone is told to stop after the fifth step, as an EarlyStopping might."""

    def on_train_batch_end(self, batch, logs=None):
        if FAULT == "early stopping" and batch == 4 and here():
            self.model.stop_training = True


def here():
    return world.current().rank == RANK


def build():
    with_devices = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    return keras.Sequential(with_devices)


def main():
    if FAULT == "before the start" and os.environ.get("OMPI_COMM_WORLD_RANK") == str(RANK):
        raise KeyError("the cause")
    tf_mp.init(devices_per_rank=2)
    training.agree_at_start({"steps": STEPS, "fault": FAULT == "settings" and here()})
    if FAULT == "data" and here():
        raise ValueError("Received: no data. Expected: some.")
    if FAULT == "download":
        data.prepare("none", FOLDER, "no_such_folder", world=world.current())
    model = tf_mp.parallelize(build, cuts="auto" if FAULT == "auto" else [1, 1], micro_batches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(training.replicate(keras.optimizers.Adam()), loss=loss)
    folder = FOLDER
    if FAULT == "disk":
        folder = os.path.join(FOLDER, "file")
        open(folder, "w").close()
    saving = checkpoint.CheckpointCallback(folder, 3)
    draw = np.random.default_rng(world.current().rank)
    steps = STEPS - 1 if FAULT == "steps" and here() else STEPS
    images = draw.random((8 * steps, 8), np.float32)
    labels = draw.integers(0, 3, 8 * steps)
    stopping = stop.AgreedStop(saving.save)
    callbacks = [training.broadcast(), Early(), stopping, saving, Fault()]
    batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)
    if FAULT == "unknown length":
        batches = batches.filter(lambda x, y: True)
    model.fit(batches, shuffle=False, verbose=0, callbacks=callbacks)
    if FAULT == "evaluation" and here():
        raise KeyError("the cause")
    evaluation.evaluate(model, images[:8], labels[:8])
    print("all steps done", flush=True)


if __name__ == "__main__":
    sys.exit(stop.guarded(main))
