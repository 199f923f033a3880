"""One turn of the resume grid, for one way to spread the work; started by `resume_grid.py`.

    resume_turn.py STAGES MICRO_BATCHES FOLDER NEXT OPTIMIZERS [SOURCES]

Without SOURCES it trains ten steps with each optimizer, saves, and goes on undisturbed for NEXT
steps. With SOURCES (names of such turns, joined by commas) it resumes from each of theirs and
makes the same steps. The losses of those steps go into `FOLDER/losses-NAME[-to].json`.

With SOURCES "order:NAME,..." it makes them with the sums over the micro-batches in other orders.
"""

import itertools
import json
import sys
from pathlib import Path

import tf_mp

# isort: split
import keras
import tensorflow as tf

from tf_mp import data, randomness, stop, training
from tf_mp.checkpoint import Checkpoints
from tf_mp.dealing import Share
from tf_mp.progress import Progress

GLOBAL_BATCH, GLOBAL_MICRO_BATCHES, FIRST, RATE = 8, 4, 10, 0.001
CUTS = {1: [8], 2: "scopes", 3: [2, 3, 3]}
ORDERS = list(itertools.permutations(range(GLOBAL_MICRO_BATCHES)))[3::4]


class Turn:
    """A split model with one optimizer, and its way through the data."""

    def __init__(self, stages, micro_batches, folder, optimizer):
        self.world = tf_mp.current_world()
        self.share = Share.of(
            GLOBAL_BATCH, GLOBAL_MICRO_BATCHES, self.world.rank, self.world.size
        )
        assert self.share.micro_batches == micro_batches
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        self.model = tf_mp.parallelize(
            tf_mp.build_model, cuts=CUTS[stages], stages=stages, micro_batches=micro_batches
        )
        tf_mp.pipeline_of(self.model).first_micro_batch = self.share.first_micro_batch
        self.model.compile(
            training.replicate(training.OPTIMIZERS[optimizer](RATE)),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        self.folder, self.optimizer = folder, optimizer
        self.name = f"{stages}-{micro_batches}-{self.world.size}"
        self.order = tf.Variable(range(GLOBAL_MICRO_BATCHES), dtype=tf.int64)

    def checkpoints(self, source):
        return Checkpoints(self.folder / "saved" / source / self.optimizer)

    def go_on(self, start, steps):
        """Trains some steps from a global step on and returns the loss of each."""
        images = data.load(
            "few_images", "train", batch_size=1, world=self.world, seed=0, start_step=start,
            steps=steps, data_dir=self.folder, share=self.share,
        )
        progress = Progress(start + steps, GLOBAL_BATCH, first_step=start, every=1)
        callbacks = [training.broadcast(), progress]
        training.fit(self.model, images.map(self._in_order), callbacks)
        return progress.losses

    def _in_order(self, images, labels):
        """The micro-batches of a rank that has all of them, in another order."""
        size = GLOBAL_BATCH // GLOBAL_MICRO_BATCHES
        if self.share.num_samples < GLOBAL_BATCH:
            return images, labels
        places = tf.reshape(self.order[:, None] * size + tf.range(size, dtype=tf.int64), [-1])
        return (
            tf.ensure_shape(tf.gather(images, places), images.shape),
            tf.ensure_shape(tf.gather(labels, places), labels.shape),
        )

    def resumed(self, source, steps):
        state = self.checkpoints(source).restore(self.model)
        assert state["step"] == FIRST
        return self.go_on(FIRST, steps)

    def in_other_orders(self, source, steps):
        """The same steps with the micro-batches, each with its keys, one after another anew."""
        plain, found = randomness.keys, []

        def keys(seeds, ordinals, step, micro_batch):
            return plain(seeds, ordinals, step, tf.gather(self.order, micro_batch))

        randomness.keys = keys
        for order in ORDERS:
            self.order.assign(order)
            found.append(self.resumed(source, steps))
        randomness.keys = plain
        return found


def main():
    stages, micro_batches, folder, steps, optimizers = sys.argv[1:6]
    sources = sys.argv[6] if len(sys.argv) > 6 else ""
    tf_mp.init(devices_per_rank=int(stages))
    found, steps = {}, int(steps)
    for optimizer in optimizers.split(","):
        turn = Turn(int(stages), int(micro_batches), Path(folder), optimizer)
        if not sources:
            turn.go_on(0, FIRST)
            turn.checkpoints(turn.name).save(turn.model, FIRST)
            found[optimizer] = turn.go_on(FIRST, steps)
            continue
        way = turn.in_other_orders if sources.startswith("order:") else turn.resumed
        names = sources.removeprefix("order:").split(",")
        found[optimizer] = {source: way(source, steps) for source in names}
    kind = "-order" if sources.startswith("order:") else "-to" if sources else ""
    if turn.world.is_root:
        (Path(folder) / f"losses-{turn.name}{kind}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(stop.guarded(main))
