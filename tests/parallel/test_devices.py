"""A problem with the devices of one rank is an error on both, before anything could hang."""

import pytest

import tf_mp
from tf_mp import devices, world


@pytest.fixture
def gpus_of_ranks(monkeypatch):
    """`tf_mp.init` as in a new process, with GPUs to see: for each rank a list of UUIDs."""

    def see(*table):
        monkeypatch.setattr(devices, "_owned", ())
        monkeypatch.setattr(devices, "_visible_gpus", lambda: table[world.current().rank])

    return see


def test_too_few_gpus_are_an_error_on_both_ranks_with_needed_and_found(gpus_of_ranks):
    gpus_of_ranks(["a", "b"], ["a", "b"])
    with pytest.raises(ValueError, match=r"2 visible GPUs for 2 ranks .* 4 in all"):
        tf_mp.init(devices_per_rank=2)


def test_one_rank_on_a_gpu_and_one_on_the_cpu_is_an_error_on_both(gpus_of_ranks):
    gpus_of_ranks(["a", "b"], [])
    with pytest.raises(ValueError, match=r"no GPU on ranks \[1\]"):
        tf_mp.init(devices_per_rank=2)


def test_tensorflow_initialised_too_early_on_one_rank_is_an_error_on_both(monkeypatch):
    monkeypatch.setattr(devices, "_owned", ())
    too_early = devices._TOO_LATE if world.current().rank == 1 else None
    monkeypatch.setattr(devices, "_take", lambda places, num_devices, share: too_early)
    with pytest.raises(RuntimeError, match=r"on ranks \[1\]: TensorFlow was initialised"):
        tf_mp.init(devices_per_rank=4)


def test_different_numbers_of_devices_are_an_error_on_both(monkeypatch):
    monkeypatch.setattr(devices, "_owned", ())
    monkeypatch.setattr(devices, "_take", lambda places, num_devices, share: None)
    with pytest.raises(ValueError, match="device map .* rank 1 has stage 1="):
        tf_mp.init(devices_per_rank=1 + world.current().rank)


def test_the_ranks_share_the_cores(monkeypatch):
    monkeypatch.setattr(devices.cores.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(devices.cores, "_quota", lambda: None)
    assert devices.cores.share_of_rank(world.current().local_size) == 3
