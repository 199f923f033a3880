"""IDX: the file format that MNIST, Fashion-MNIST and Kuzushiji-MNIST come in, plain or gzipped.

A file is a magic number (two zero bytes, the type of the values, the number of dimensions), the
size of each dimension as a big-endian 32-bit integer, and the values. Everything is checked before
it is used: a download that broke off must not become a shorter data set.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

__all__ = ["FILES", "read_folder", "write_folder"]

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
"""For each split, the names of its images and labels; `.gz` may follow, a dot may precede idx."""

_UNSIGNED_BYTE = 8

Split = tuple[np.ndarray, np.ndarray]


def read_folder(folder: str | Path) -> dict[str, Split]:
    """Reads the four files of a folder.

    Args:
        folder: holds the files named in `FILES`.

    Returns:
        For "train" and "test": images (count, rows, columns) uint8 and labels (count,) uint8.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no IDX file of bytes, is cut short, or counts differ.
    """
    paths = {
        split: [_find(Path(folder), stem) for stem in stems] for split, stems in FILES.items()
    }
    return {split: _read_split(*both) for split, both in paths.items()}


def write_folder(folder: str | Path, splits: dict[str, Split]) -> None:
    """Writes arrays as the four files that `read_folder` reads, uncompressed."""
    for split, arrays in splits.items():
        for stem, array in zip(FILES[split], arrays, strict=True):
            magic = bytes([0, 0, _UNSIGNED_BYTE, array.ndim])
            sizes = np.asarray(array.shape, ">u4").tobytes()
            (Path(folder) / stem).write_bytes(magic + sizes + array.astype(np.uint8).tobytes())


def _find(folder: Path, stem: str) -> Path:
    names = [stem, stem.replace("-idx", ".idx")]
    for name in [name + ending for name in names for ending in ("", ".gz")]:
        if (folder / name).is_file():
            return folder / name
    wanted = ", ".join(name + "[.gz]" for both in FILES.values() for name in both)
    raise FileNotFoundError(
        f"{folder} does not hold {stem} or {stem}.gz. Expected MNIST's four IDX files: {wanted}. "
        "Name the folder that holds them."
    )


def _read_split(images_path: Path, labels_path: Path) -> Split:
    images, labels = _read(images_path, 3), _read(labels_path, 1)
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            f"Received {len(images)} images in {images_path} but {len(labels)} labels in "
            f"{labels_path}. Expected as many of each, and one at least: fetch both files again."
        )
    return images, labels


def _read(path: Path, num_dimensions: int) -> np.ndarray:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}). Fetch it again.") from error
    start = 4 + 4 * num_dimensions
    if data[:4] != bytes([0, 0, _UNSIGNED_BYTE, num_dimensions]) or len(data) < start:
        raise ValueError(
            f"{path} starts with {data[:4].hex()}. Expected 0000080{num_dimensions}, an IDX file "
            f"of bytes in {num_dimensions} dimension(s): is it the right file, or still packed?"
        )
    shape = [int(size) for size in np.frombuffer(data, ">u4", num_dimensions, offset=4)]
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise ValueError(
            f"{path} holds {len(data)} bytes. Expected {expected} for the shape {shape} that it "
            "names: it was cut short. Fetch it again."
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
