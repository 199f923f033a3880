"""Two ranks prepare a set once, fail together, and share each global batch without overlap."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

from tf_mp import data, idx, world


@pytest.fixture(scope="module")
def folder():
    """One folder for both ranks, with IDX files in it."""
    made = tempfile.mkdtemp() if world.current().is_root else None
    folder = Path(world.broadcast(made))
    if world.current().is_root:
        images = np.zeros((90, 28, 28), np.uint8)
        images[:, 0, 0] = np.arange(90)
        split = (images, (np.arange(90) % 10).astype(np.uint8))
        idx.write_folder(folder, {"train": split, "test": tuple(part[:31] for part in split)})
    world.exchange(None, what="the files are there")
    return folder


def test_both_ranks_get_the_set_that_the_root_rank_prepared(folder, capfd):
    path = data.prepare("ranked", folder / "sets", folder, world=world.current())
    said = world.exchange(capfd.readouterr().err.count("preparing 'ranked'"), what="said")
    assert path == folder / "sets" / "ranked" / "1.0.0" and said == [1, 0]


def test_a_failure_on_one_rank_ends_both_with_its_cause(folder):
    mine = folder / f"broken{world.current().rank}"
    if world.current().rank == 1:
        mine.write_text("a file where the data folder should be")
    with pytest.raises(data.DataError, match=r"^Rank 1: Cannot write to the data.*broken1"):
        data.prepare("unranked", mine, folder, world=world.current())


def test_files_that_are_not_there_end_both_ranks_with_the_cause(folder):
    with pytest.raises(data.DataError, match="train-images-idx3-ubyte"):
        data.prepare("unranked", folder / "sets", folder / "sets", world=world.current())


def numbers(batches):
    return [np.rint(images[:, 0, 0, 0] * 255).astype(int).tolist() for images, _ in batches]


def load(folder, split, here, **settings):
    data.prepare("ranked", folder / "sets", folder, world=world.current())
    settings.setdefault("batch_size", 20 // here.size)
    return numbers(
        data.load("ranked", split, world=here, seed=5, data_dir=folder / "sets", **settings)
    )


def test_the_ranks_parts_of_a_global_batch_are_the_batch_of_one_rank(folder):
    both = world.exchange(load(folder, "train", world.current(), steps=6), what="batches")
    alone = load(folder, "train", world.World(), steps=6)
    assert [one + other for one, other in zip(*both)] == alone


def test_evaluation_is_dealt_to_both_ranks_without_leaving_or_doubling(folder):
    settings = {"shuffle": False, "batch_size": 15}
    both = world.exchange(load(folder, "test", world.current(), **settings), what="batches")
    assert len(both[0]) == len(both[1]) == 2
    assert sorted(sum(both[0] + both[1], [])) == list(range(31))
