"""IDX files are read exactly, plain or gzipped, and a broken one is no shorter one."""

import gzip

import numpy as np
import pytest

from tf_mp import idx

RNG = np.random.default_rng(7)
SPLITS = {
    "train": (RNG.integers(0, 256, (6, 4, 5), np.uint8), RNG.integers(0, 10, 6, np.uint8)),
    "test": (RNG.integers(0, 256, (3, 4, 5), np.uint8), RNG.integers(0, 10, 3, np.uint8)),
}
IMAGES = "train-images-idx3-ubyte"


@pytest.fixture
def folder(tmp_path):
    idx.write_folder(tmp_path, SPLITS)
    return tmp_path


def assert_equal(read):
    assert read.keys() == SPLITS.keys()
    for split, arrays in SPLITS.items():
        for got, expected in zip(read[split], arrays):
            np.testing.assert_array_equal(got, expected)


def test_what_is_written_is_read(folder):
    assert_equal(idx.read_folder(folder))


def test_gzipped_files_and_names_with_a_dot_are_read(folder):
    for path in list(folder.iterdir()):
        packed = folder / (path.name.replace("-idx", ".idx") + ".gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert_equal(idx.read_folder(folder))


def test_the_bytes_are_those_of_the_format(folder):
    start = (folder / IMAGES).read_bytes()[:16]
    assert start == bytes([0, 0, 8, 3, 0, 0, 0, 6, 0, 0, 0, 4, 0, 0, 0, 5])


def test_a_missing_file_names_all_four(folder):
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte.*four IDX files"):
        idx.read_folder(folder)


def test_a_file_that_was_cut_short_is_refused(folder):
    path = folder / IMAGES
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="holds 135 bytes. Expected 136"):
        idx.read_folder(folder)


def test_a_gzip_file_that_was_cut_short_is_refused(folder):
    path = folder / IMAGES
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    (folder / f"{IMAGES}.gz").write_bytes(packed[:-9])
    with pytest.raises(ValueError, match="no whole gzip file"):
        idx.read_folder(folder)


def test_another_format_is_refused(folder):
    (folder / IMAGES).write_bytes(b"<!DOCTYPE html><html>not found</html>")
    with pytest.raises(ValueError, match="Expected 00000803"):
        idx.read_folder(folder)


def test_more_images_than_labels_is_refused(folder):
    idx.write_folder(folder, {"train": (SPLITS["train"][0], SPLITS["train"][1][:5])})
    with pytest.raises(ValueError, match="6 images .* but 5 labels"):
        idx.read_folder(folder)
