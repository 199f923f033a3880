"""A plain process is a world of one, and what ranks tell each other stays JSON."""

import dataclasses
import sys

import pytest

from tf_mp import world
from tf_mp.world import World


def test_a_plain_process_is_the_root_of_a_world_of_one():
    assert world.current() == World(rank=0, size=1, local_rank=0, local_size=1)
    assert world.current().is_root
    assert not World(rank=1, size=2).is_root


def test_a_world_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        World().rank = 1


def test_values_come_back_as_json_holds_them():
    assert world.exchange({"a": (1, 2)}) == [{"a": [1, 2]}]
    assert world.broadcast("x") == "x"
    world.agree("a digest", "0a1b")


def test_a_value_that_json_cannot_hold_is_refused_and_never_pickled():
    with pytest.raises(TypeError):
        world.exchange(object())


@pytest.fixture
def two_ranks(monkeypatch):
    """Stands in for a second rank, which sends the given line."""

    def second(line):
        monkeypatch.setattr(world, "current", lambda: World(size=2))
        monkeypatch.setattr(world, "_channel", lambda: lambda text: text + b"\n" + line + b"\n")

    return second


def test_the_ranks_and_the_entries_that_differ_are_named(two_ranks):
    two_ranks(b'["versions", {"keras": "3.14", "numpy": "2.4"}]')
    with pytest.raises(ValueError, match=r"rank 1 has keras='3.14' where rank 0 has '3.15'"):
        world.agree("versions", {"keras": "3.15", "numpy": "2.4"})


def test_ranks_at_different_places_of_the_program_are_noticed(two_ranks):
    two_ranks(b'["steps", 3]')
    with pytest.raises(RuntimeError, match="rank 0: versions, rank 1: steps"):
        world.agree("versions", 3)


def test_a_launcher_without_horovod_is_an_error(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"2 processes .* Horovod .* is not installed"):
        world.init()


def test_one_plain_process_works_without_horovod(monkeypatch):
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: None)
    assert world.init() == World()


def test_a_launcher_of_more_ranks_than_horovod_sees_is_an_error(monkeypatch):
    """`srun` without `--mpi=pmix` starts as many worlds of one as there are tasks."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(RuntimeError, match="4 processes, but Horovod sees 1"):
        world.init()


def test_a_plain_process_tells_open_mpi_where_it_lies(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("OPAL_PREFIX", raising=False)
    world.prepare_environment()
    assert "OPAL_PREFIX" not in world.os.environ
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    monkeypatch.setenv("OPAL_PREFIX", "/chosen/by/the/user")
    world.prepare_environment()
    assert world.os.environ["OPAL_PREFIX"] == "/chosen/by/the/user"
    monkeypatch.delenv("OPAL_PREFIX")
    world.prepare_environment()
    assert world.os.environ["OPAL_PREFIX"] == str(tmp_path)
    monkeypatch.delenv("OPAL_PREFIX")
