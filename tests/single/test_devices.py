"""Which devices a rank gets; GPUs are stood in for by lists of UUIDs and of physical devices."""

import os
import types

import pytest
import tensorflow as tf

import tf_mp
from tf_mp import cores, devices, gpus, world

HOST = ["a", "b", "c", "d"]


@pytest.fixture
def not_initialised(monkeypatch):
    """`tf_mp.init` as in a new process."""
    monkeypatch.setattr(devices, "_owned", ())


@pytest.fixture
def gpu_machine(monkeypatch, not_initialised):
    """TensorFlow with four GPUs in its list; what is asked of it is noted."""
    cards = [types.SimpleNamespace(name=f"/physical_device:GPU:{i}") for i in range(4)]
    asked = types.SimpleNamespace(cards=cards, visible=list(cards), grown=[])
    config = tf.config
    monkeypatch.setattr(
        config, "list_physical_devices", lambda kind=None: cards if kind == "GPU" else [None]
    )
    monkeypatch.setattr(config, "get_visible_devices", lambda kind=None: asked.visible)
    monkeypatch.setattr(
        config, "set_visible_devices", lambda some, kind: setattr(asked, "chosen", list(some))
    )
    monkeypatch.setattr(
        config.experimental, "set_memory_growth", lambda gpu, on: asked.grown.append(gpu)
    )
    monkeypatch.setattr(devices, "_visible_gpus", lambda: list(HOST))
    monkeypatch.setattr(devices, "_set_threads", lambda share, num_devices: None)
    return asked


def as_rank(monkeypatch, rank, size, table):
    """Stands in for the other ranks: all see what `table` says and have no problem."""
    here = world.World(rank, size, rank, size)
    monkeypatch.setattr(world, "init", lambda: here)
    monkeypatch.setattr(world, "current", lambda: here)
    monkeypatch.setattr(
        world,
        "exchange",
        lambda value, what="": table if what == "visible GPUs" else [value] * size,
    )


def test_a_rank_gets_the_gpus_of_its_local_rank_in_stage_order(gpu_machine, monkeypatch):
    as_rank(monkeypatch, 1, 2, [HOST, HOST])
    tf_mp.init(devices_per_rank=2)
    assert gpu_machine.chosen == gpu_machine.cards[2:4]
    assert gpu_machine.grown == gpu_machine.cards[2:4]
    assert devices.owned() == ("/device:GPU:0", "/device:GPU:1")


def test_by_default_the_visible_gpus_are_shared_out_among_the_local_ranks(
    gpu_machine, monkeypatch
):
    as_rank(monkeypatch, 1, 2, [HOST, HOST])
    tf_mp.init()
    assert gpu_machine.chosen == gpu_machine.cards[2:4]


def test_a_script_that_pins_one_gpu_hears_which_line_to_delete(gpu_machine, monkeypatch):
    gpu_machine.visible = gpu_machine.cards[:1]
    with pytest.raises(RuntimeError, match=r"Delete the line that pins one GPU by local_rank"):
        tf_mp.init(devices_per_rank=2)


def test_tensorflow_initialised_too_early_is_one_sentence(not_initialised):
    tf.constant(0)
    with pytest.raises(RuntimeError, match=r"ranks \[0\]: TensorFlow was initialised before"):
        tf_mp.init(devices_per_rank=3)


def test_a_second_init_does_nothing_or_is_refused():
    tf_mp.init()
    tf_mp.init(devices_per_rank=4)
    with pytest.raises(RuntimeError, match=r"devices_per_rank=3\. Expected: 4"):
        tf_mp.init(devices_per_rank=3)
    with pytest.raises(ValueError, match="at least 1"):
        tf_mp.init(devices_per_rank=0)


def test_ranks_that_share_a_host_get_gpus_apart():
    assert gpus.deal([HOST, HOST], 2) == [[0, 1], [2, 3]]
    assert gpus.deal([HOST, HOST], 1) == [[0], [1]]


def test_two_hosts_each_start_from_their_first_gpu():
    assert gpus.deal([["a", "b"], ["c", "d"]], 2) == [[0, 1], [0, 1]]


def test_a_scheduler_may_show_each_rank_its_own_gpus_under_the_same_numbers():
    """Every task of a scheduler may see `CUDA_VISIBLE_DEVICES=0,1`, and other cards behind it."""
    assert gpus.deal([["a", "b"], ["c", "d"]], None) == [[0, 1], [0, 1]]


def test_ranks_that_list_the_same_gpus_in_another_order_get_gpus_apart():
    assert gpus.deal([["a", "b"], ["b", "a"]], 1) == [[0], [0]]


def test_no_gpu_anywhere_means_cpus():
    assert gpus.deal([[], []], 2) == [[], []]


@pytest.mark.parametrize(
    ("table", "per_rank", "message"),
    [
        ([["a", "b"]] * 2, 2, r"2 visible GPUs for 2 ranks .* 4 in all; start 1 .* each rank 1 "),
        ([["a"]] * 2, None, r"1 visible GPUs for 2 ranks .* 2 in all.*start 1 "),
        ([["a"]], 2, r"1 visible GPUs for 1 ranks .* 2 in all; give each rank 1 "),
        ([["a"], []], 1, r"no GPU on ranks \[1\]"),
        ([["a", "b"], ["b", "c"]], 1, r"ranks \[0, 1\] see partly the same"),
        ([["a", "b"], ["c"]], None, r"would get \[1, 2\] GPUs each"),
    ],
)
def test_gpus_that_do_not_suffice_are_named_with_needed_found_and_remedies(
    table, per_rank, message
):
    with pytest.raises(ValueError, match=message):
        gpus.deal(table, per_rank)


def test_a_device_of_another_rank_is_refused_with_the_list_of_ones_own():
    assert devices.resolve(["cpu:1", "/CPU:0", "/device:CPU:2"]) == (
        "/device:CPU:1", "/device:CPU:0", "/device:CPU:2",
    )
    with pytest.raises(ValueError, match=r"/device:CPU:3.*'/gpu:5'.*local to a rank"):
        devices.resolve(["/gpu:5"])


@pytest.mark.parametrize(
    ("name", "value"), [("KERAS_BACKEND", "jax"), ("TF_USE_LEGACY_KERAS", "1")]
)
def test_another_keras_is_refused_before_anything_starts(
    not_initialised, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    monkeypatch.delitem(devices.sys.modules, "keras")
    monkeypatch.setattr(world, "init", lambda: pytest.fail("Horovod was started"))
    with pytest.raises(ValueError, match=value if name == "KERAS_BACKEND" else name):
        tf_mp.init(devices_per_rank=4)


def test_a_cpu_device_is_about_one_core(monkeypatch):
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [devices._intra_op(share, 2) for share in (1, 2, 8)] == [1, 1, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert devices._intra_op(8, 2) == 3
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    assert devices._intra_op(8, 2) == 5


def test_cores_are_shared_unless_the_launcher_bound_each_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "_quota", lambda: None)
    assert [cores.share_of_rank(n) for n in (1, 2, 3, 100)] == [8, 4, 2, 1]
    monkeypatch.setattr(cores, "_bound_by_launcher", lambda: True)
    assert cores.share_of_rank(2) == 8
    monkeypatch.setattr(cores, "_quota", lambda: 3.0)
    assert cores.share_of_rank(2) == 1


def test_a_quota_is_read_from_both_versions_of_control_groups(tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cores._read_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores._read_quota(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    assert cores._read_quota(tmp_path) is None
    (tmp_path / "cpu.cfs_quota_us").write_text("400000")
    assert cores._read_quota(tmp_path) == 4
