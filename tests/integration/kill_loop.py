"""Kills a short run with frequent checkpoints again and again, at random moments.

    python tests/integration/kill_loop.py [KILLS] [FOLDER]

A process that has imported TensorFlow, but not started it, is forked for each run; so 200 kills
(the default) take some minutes. Each run resumes, makes steps with a checkpoint after each, and is
killed. After each kill every checkpoint must be whole, and the next run must resume from the last
one whose saving had ended, or one more. In the end the weights must be those of a run that was
never killed.
"""

import collections
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.modules["horovod"] = None  # one plain process

import tf_mp  # noqa: E402

# isort: split
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tf_mp import checkpoint, evaluation, split, training  # noqa: E402

BATCHES, WINDOW_S, SEED = 16, 0.8, 0


class Told(checkpoint.Checkpoints):
    """Checkpoints that write down when a save begins and ends."""

    def __init__(self, folder, journal):
        super().__init__(folder / "saved", keep=2)
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, word, step):
        os.write(self._journal, f"{word} {step}\n".encode())

    def save(self, model, step, **more):
        self.note("saving", step)
        super().save(model, step, **more)
        self.note("saved", step)


def build():
    """A network with dropout: its draws follow from the step, also after a resume."""
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *layers])


def train(folder, until, kept):
    """One run: it resumes what there is, and goes on to a step with or without checkpoints."""
    tf_mp.init(devices_per_rank=2)
    keras.utils.set_random_seed(SEED)
    model = tf_mp.parallelize(build, cuts=[1, 2], micro_batches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=True)
    checkpoints = Told(folder, folder / "journal")
    first = training.resume(model, checkpoints, {}) if kept else 0
    checkpoints.note("resumed", first)
    draw = np.random.default_rng(SEED)
    images = draw.random((BATCHES, 4, 8), np.float32)
    labels = draw.integers(0, 3, (BATCHES, 4))
    data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
    saving = checkpoint.CheckpointCallback(checkpoints if kept else None, 1, first_step=first)
    if first < until:
        model.fit(data.skip(first % BATCHES), steps_per_epoch=until - first, shuffle=False,
                  verbose=0, callbacks=[saving])
    np.savez(folder / f"weights-{kept}.npz", *[v.numpy() for v in model.variables])


def fork(folder, until, kept=True):
    """Starts a run and returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        train(folder, until, kept)
        code = 0
    finally:
        os._exit(code)


def journal(folder):
    """What all runs have noted: words and steps."""
    path = folder / "journal"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(word, int(step)) for word, step in map(str.split, lines)]


def wait_for(lines, folder, before):
    """Waits until the run has noted so many lines."""
    limit = time.monotonic() + 120
    while len(journal(folder)) < before + lines and time.monotonic() < limit:
        time.sleep(0.005)


def last(lines, word):
    """The step of the last line with a word, or 0."""
    return next((step for found, step in reversed(lines) if found == word), 0)


def check_whole(folder):
    """Every checkpoint that bears its name is complete."""
    found = list((folder / "saved").glob("step-*"))
    for path in found:
        state = json.loads((path / "state.json").read_text())
        digest = hashlib.sha256((path / "model.keras").read_bytes()).hexdigest()
        assert state["model_sha256"] == digest, path
    return len(found)


def kill_once(folder, draw, moments):
    """One run and its death at a random moment; returns the step from which it resumed."""
    lines = journal(folder)
    saved = last(lines, "saved")
    pid = fork(folder, 10**6)
    # most often among the saves, at times before the first one or before the run resumes
    wait_for(draw.choices([2, 1, 0], [0.7, 0.15, 0.15])[0], folder, len(lines))
    time.sleep(draw.uniform(0, WINDOW_S))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), (folder / "log").read_text()[-3000:]
    new = journal(folder)[len(lines) :]
    moments[new[-1][0] if new else "starting"] += 1
    if new:
        assert new[0][0] == "resumed" and saved <= new[0][1] <= saved + 1, (saved, new[:3])
    check_whole(folder)


def main(kills, folder):
    """Kills, checks after each kill, and compares the end with an undisturbed run."""
    draw, moments = random.Random(SEED), collections.Counter()
    for number in range(kills):
        kill_once(folder, draw, moments)
        if number % 20 == 19:
            print(f"{number + 1} kills, step {last(journal(folder), 'saved')}", flush=True)
    until = last(journal(folder), "saved") + 5
    for kept in (True, False):
        _, status = os.waitpid(fork(folder, until, kept), 0)
        assert status == 0, (folder / "log").read_text()[-3000:]
    ours, theirs = (np.load(folder / f"weights-{kept}.npz") for kept in (True, False))
    apart = max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs.files)
    assert "damaged" not in (folder / "log").read_text()
    words = ", ".join(f"{count} {word}" for word, count in moments.most_common())
    print(f"{kills} kills (last word before it: {words}); {until} steps; every run resumed from "
          f"the last checkpoint; none was damaged; the weights are {apart:.1e} from those of an "
          "undisturbed run", flush=True)
    assert apart <= 1e-6


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    assert evaluation and split
    if len(sys.argv) > 2:
        main(count, Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(count, Path(temporary))
