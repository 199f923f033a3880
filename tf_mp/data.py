"""The input: every rank's part of one global order of samples, the same for every number of ranks.

Global batch t is samples [t*G, (t+1)*G) of a seeded order that is drawn anew each epoch, where G
is the batch size of a rank times the world size; rank r gets the r-th part of it. So two runs with
the same G see the same global batches, whatever their number of ranks, and a run resumes at any
step by its number alone.

A split that fits in memory (2 GiB decoded) is decoded once; batches are then gathered from it by
index, without Python in the loop and without reading what is skipped. A larger one is streamed
from TFDS's files, which TFDS shuffled when it wrote them, and mixed anew each epoch within windows
of 10,000; resuming then passes over the records of the current epoch undecoded.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_mp.datasets import DataError, data_folder, find
from tf_mp.dealing import Deal, Share
from tf_mp.preparation import prepare

if TYPE_CHECKING:
    import tensorflow as tf

    from tf_mp.sources import Source

__all__ = ["DataError", "check_range", "load", "prepare"]


def load(
    name: str,
    split: str,
    *,
    batch_size: int,
    world: Any,
    seed: int,
    data_dir: str | Path | None = None,
    start_step: int = 0,
    steps: int | None = None,
    shuffle: bool = True,
    drop_remainder: bool | None = None,
    share: Share | None = None,
) -> tf.data.Dataset:
    """One rank's batches of a prepared data set.

    Args:
        name: a prepared set with the features "image" (of one shape) and "label".
        split: a split in TFDS's words: "train", "test", "train[:10%]".
        batch_size: samples a rank and step.
        world: this process among the ranks (`rank`, `size`).
        seed: of the order; the same on all ranks.
        data_dir: the folder of all data sets; by default TFDS's own.
        start_step: the first global step to deliver.
        steps: how many steps to deliver, over as many epochs as that takes; by default to the end
            of the epoch in which `start_step` lies.
        shuffle: draws a new order each epoch; else the stored order.
        drop_remainder: True gives batches of one fixed size and leaves over, with a sentence, what
            does not fill a global batch at the end of an epoch. False deals one epoch without
            leaving or doubling a sample: as many steps on every rank, none of them empty, only
            sizes differ. By default as `shuffle`: True for training, False for evaluation.
        share: this rank's part of each global batch; by default the equal one that `batch_size`
            and `world` give.

    Returns:
        Batches (images, labels): (batch, height, width, channels) float32 in [0, 1] and (batch,)
        int64; its cardinality is known.

    Raises:
        DataError: the set is not prepared, or is not made of images of one shape and labels.
        ValueError: there are fewer samples than a global batch, or than ranks; `start_step` or
            `steps` make no sense.
    """
    import tensorflow as tf

    from tf_mp.sources import open_source

    fixed = shuffle if drop_remainder is None else drop_remainder
    _check_steps(fixed, start_step, steps)
    with tf.device("/CPU:0"):  # The samples stay on the host, whatever devices there are.
        source = open_source(_prepared(name, data_dir), split)
        deal = Deal(source.count, batch_size, world.rank, world.size, share)
        if fixed:
            _say(world, deal.left_over(f"{name} {split}", shuffle))
            keys = _training(source, deal, seed, start_step, steps, shuffle)
        else:
            keys = source.whole(deal, seed, shuffle)
        return _finish(source, keys)


def _check_steps(fixed: bool, start_step: int, steps: int | None) -> None:
    if start_step < 0 or (steps is not None and steps < 0):
        raise ValueError(f"Received {start_step=}, {steps=}. Expected 0 or more.")
    if not fixed and (start_step or steps is not None):
        raise ValueError(
            f"Received {start_step=}, {steps=} with drop_remainder=False, which deals one whole "
            "epoch. Pass drop_remainder=True to start or end elsewhere."
        )


def _prepared(name: str, data_dir: str | Path | None) -> Path:
    path = find(name, data_dir)
    if path is None:
        folder = data_folder(data_dir)
        raise DataError(
            f"Received the data set {name!r}, which is not prepared in {folder}. Run\n"
            f"  tf-mp data --dataset {name} --data-dir {folder}\n"
            "first, or call tf_mp.data.prepare."
        )
    return path


def _say(world: Any, sentence: str) -> None:
    if sentence and world.rank == 0:
        print(f"tf_mp: {sentence}", file=sys.stderr, flush=True)


def _training(
    source: Source, deal: Deal, seed: int, start_step: int, steps: int | None, shuffle: bool
) -> tf.data.Dataset:
    """Keys of the batches from `start_step` on, epoch after epoch."""
    import tensorflow as tf

    per_epoch = deal.steps_per_epoch()
    first, passed = divmod(start_step, per_epoch)
    steps = per_epoch - passed if steps is None else steps
    epochs = tf.data.Dataset.range(first, first + -(-(passed + steps) // per_epoch))
    keys = epochs.flat_map(lambda epoch: source.epoch(deal, seed, epoch, shuffle))
    keys = keys.skip(passed).take(steps)
    return keys.apply(tf.data.experimental.assert_cardinality(steps))


def _finish(source: Source, keys: tf.data.Dataset) -> tf.data.Dataset:
    """Keys to scaled images and labels, ahead of the training, in an order that never changes."""
    import tensorflow as tf

    def decode(*batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
        images, labels = source.decode(batch[0] if len(batch) == 1 else batch)
        scale = images.dtype.max if images.dtype.is_integer else 1
        return tf.cast(images, tf.float32) / scale, labels

    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 2  # The stages' own threads stay theirs.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return keys.map(decode, num_parallel_calls=2).prefetch(2).with_options(options)


_warned: set[str] = set()


def check_range(images: Any, what: str = "images") -> bool:
    """Warns, once, where images are not in [0, 1]: as 0 to 255 most networks do not learn.

    Args:
        images: (batch, ...) of numbers, a tensor or an array.
        what: what they are called in the warning; each name warns once.

    Returns:
        Whether all values are in [0, 1].
    """
    import numpy as np

    values = np.asarray(images)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    fine = 0.0 <= low and high <= 1.0  # False for NaN too.
    if not fine and what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"Received {what} with values from {low:g} to {high:g}. Expected [0, 1]: on other "
            "ranges training may stand still. Divide bytes by 255, as tf_mp.data.load does.",
            stacklevel=2,
        )
    return fine
