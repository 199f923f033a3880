"""The two ways to a split's samples: held in memory, or streamed from TFDS's files.

A source gives *keys* (positions in memory, or undecoded records) in batches, and turns a batch of
keys into images and labels. So what is skipped on a resume is never decoded.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf
import tensorflow_datasets as tfds

from tf_mp.datasets import DataError
from tf_mp.dealing import Deal

__all__ = ["Source", "open_source"]

MEMORY_BYTES = 2 << 30
"""A split up to this size, decoded, is held in memory by each rank."""
WINDOW = 10_000
"""So many records in a row of a streamed split are mixed with each other."""


class Source(Protocol):
    """The samples of one split."""

    count: int

    def epoch(self, deal: Deal, seed: int, epoch: tf.Tensor, shuffle: bool) -> tf.data.Dataset:
        """This rank's fixed-size batches of keys in one epoch of training."""

    def whole(self, deal: Deal, seed: int, shuffle: bool) -> tf.data.Dataset:
        """This rank's batches of keys in one epoch of evaluation, nothing left over."""

    def decode(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys to images (batch, height, width, channels) as stored, labels (batch,) int64."""


def open_source(path: Path, split: str) -> Source:
    """Opens a split of a prepared set.

    Args:
        path: the folder of the set's version.
        split: in TFDS's words: "train", "test[:10%]".

    Raises:
        DataError: the set is not made of images of one shape and labels.
        ValueError: there is no such split.
    """
    builder = _builder(path)
    features = builder.info.features
    names = {*features} if isinstance(features, tfds.features.FeaturesDict) else set()
    if not {"image", "label"} <= names:
        raise DataError(
            f"Received {path}, whose features are {features}. Expected 'image' and 'label': read "
            "this set with tensorflow_datasets and a pipeline of your own."
        )
    shape = features["image"].shape
    if None in shape:
        raise DataError(
            f"Received {path} with images of shape {shape}. Expected one fixed shape: resize the "
            "images in a pipeline of your own."
        )
    size = functools.reduce(int.__mul__, shape) * builder.info.splits[split].num_examples
    return _in_memory(path, split) if size <= MEMORY_BYTES else _Stream(builder, split)


@functools.lru_cache(maxsize=4)
def _builder(path: Path) -> Any:
    return tfds.builder_from_directory(str(path))


# Files are read one after the other: so the stored order is the same everywhere.
_IN_ORDER = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)


@functools.lru_cache(maxsize=2)
def _in_memory(path: Path, split: str) -> _Memory:
    """Training and evaluation, or two runs in one process, share what was decoded."""
    return _Memory(_builder(path), split)


class _Memory:
    """A split decoded once; keys are positions, batches are gathered."""

    def __init__(self, builder: Any, split: str) -> None:
        samples = builder.as_dataset(split=split, batch_size=-1, read_config=_IN_ORDER)
        self.images, self.labels = samples["image"], tf.cast(samples["label"], tf.int64)
        self.count = int(self.labels.shape[0])

    def _order(self, seed: int, epoch: Any, shuffle: bool) -> tf.Tensor:
        order = tf.range(self.count, dtype=tf.int64)
        if not shuffle:
            return order
        return tf.random.experimental.stateless_shuffle(order, seed=_pair(seed, epoch))

    def epoch(self, deal: Deal, seed: int, epoch: tf.Tensor, shuffle: bool) -> tf.data.Dataset:
        steps = deal.steps_per_epoch()
        order = self._order(seed, epoch, shuffle)[: steps * deal.global_batch]
        batches = tf.reshape(order, [steps, deal.global_batch])
        return tf.data.Dataset.from_tensor_slices(batches[:, deal.part])

    def whole(self, deal: Deal, seed: int, shuffle: bool) -> tf.data.Dataset:
        order = tf.data.Dataset.from_tensor_slices(self._order(seed, 0, shuffle))
        return _in_sizes(order, deal)

    def decode(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(self.images, keys), tf.gather(self.labels, keys)


class _Stream:
    """A split read from its files; keys are undecoded records, mixed within windows."""

    def __init__(self, builder: Any, split: str) -> None:
        self.count = builder.info.splits[split].num_examples
        self._image = builder.info.features["image"]
        records = builder.as_dataset(
            split=split, read_config=_IN_ORDER, decoders={"image": tfds.decode.SkipDecoding()}
        )
        self._records = records.map(lambda record: (record["image"], record["label"]))

    def _order(self, seed: int, epoch: Any, shuffle: bool) -> tf.data.Dataset:
        if not shuffle:
            return self._records
        both = _pair(seed, epoch)

        def mix(window: tf.Tensor, records: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, ...]:
            positions = tf.range(tf.shape(records[0])[0])
            drawn = tf.random.experimental.stateless_fold_in(both, window)
            positions = tf.random.experimental.stateless_shuffle(positions, seed=drawn)
            return tuple(tf.gather(part, positions) for part in records)

        # Not `Dataset.shuffle`: its order depends on the global seed, which may differ by rank.
        return self._records.batch(WINDOW).enumerate().map(mix).unbatch()

    def epoch(self, deal: Deal, seed: int, epoch: tf.Tensor, shuffle: bool) -> tf.data.Dataset:
        mine = deal.part
        order = self._order(seed, epoch, shuffle)
        batches = order.batch(deal.global_batch, drop_remainder=True)
        return batches.map(lambda images, labels: (images[mine], labels[mine]))

    def whole(self, deal: Deal, seed: int, shuffle: bool) -> tf.data.Dataset:
        return _in_sizes(self._order(seed, 0, shuffle), deal)

    def decode(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        records, labels = keys
        kind = tf.TensorSpec(self._image.shape, self._image.tf_dtype)
        images = tf.map_fn(self._image.decode_example, records, fn_output_signature=kind)
        return images, tf.cast(labels, tf.int64)


def _pair(seed: int, epoch: Any) -> tf.Tensor:
    return tf.stack([tf.cast(seed, tf.int64), tf.cast(epoch, tf.int64)])


def _in_sizes(order: tf.data.Dataset, deal: Deal) -> tf.data.Dataset:
    start, _ = deal.share()
    groups = deal.sizes()
    uniform = len(groups) == 1
    parts = []
    for number, size in groups:
        part = order.skip(start).take(number * size)
        parts.append(part.batch(size, drop_remainder=uniform))
        start += number * size
    return functools.reduce(lambda one, other: one.concatenate(other), parts)
