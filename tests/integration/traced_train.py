"""`scripts/train.py` that writes down each micro-batch, and whose ranks die where told.

    traced_train.py FOLDER EVENTS OPTIONS...

Each process appends lines to its own file in FOLDER: the global step, the global index of a
micro-batch, the stage, and a digest of the images (stage 0) and of the keys of all random draws.

EVENTS is a JSON list, of which one after the other happens:
    ["kill", step, size, rank]  that rank of a world of that size dies in the middle of that step
    ["join", step, size]        from that step on a world of that size waits until it is another
The file `event-N` in FOLDER says that event N has begun; the discovery script reads it.
"""

import hashlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

FOLDER, EVENTS = Path(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
PATIENCE_S = 300

import tf_mp  # noqa: E402

# isort: split
import tensorflow as tf  # noqa: E402

from tf_mp import elastic, randomness, stage, world  # noqa: E402

FILE = (FOLDER / f"trace-{os.getpid()}.jsonl").open("a", buffering=1)


def over():
    """How many events have been."""
    return len(list(FOLDER.glob("event-*")))


def note(index, step, micro_batch, *arrays):
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]
    FILE.write(json.dumps([int(step), int(micro_batch), int(index), digest]) + "\n")
    event = EVENTS[over()] if over() < len(EVENTS) else None
    here = world.current()
    if event == ["kill", int(step), here.size, here.rank] and micro_batch % 2:
        (FOLDER / f"event-{over()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def forward(self, training, weights, state, seeds, inputs, masks, step, micro_batch, token):
    if training:
        ordinals = [self.ordinals[id(v)] for v in self.seeds]
        keys = randomness.keys(seeds, ordinals, step, micro_batch)
        noted = [*inputs, *keys] if self.index == 0 else keys
        noted = [self.index, step, micro_batch, *noted]
        zero = tf.numpy_function(note, noted, tf.float64)
        token = token + tf.reshape(tf.cast(zero, token.dtype), [])
    return plain(self, training, weights, state, seeds, inputs, masks, step, micro_batch, token)


class Waiting(elastic._Keep):
    """Waits for a rank that joins, where the list says so, once a step is kept."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        event = EVENTS[over()] if over() < len(EVENTS) else None
        size = world.current().size
        if event is None or event[0] != "join" or event[2] != size or self._step < event[1]:
            return
        world.exchange(None, what="a step to wait at")
        if world.current().is_root:
            (FOLDER / f"event-{over()}").touch()
        limit = time.monotonic() + PATIENCE_S
        while time.monotonic() < limit:
            time.sleep(0.3)
            self._memory.keep(self.model, self._step)
            self._memory.look()


plain, stage.Stage._forward = stage.Stage._forward, forward
elastic._Keep = Waiting
assert tf_mp
runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train.py"), run_name="__main__")
