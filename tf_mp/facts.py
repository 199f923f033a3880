"""What this machine is like, as `tf-mp doctor` asks; nothing here imports TensorFlow."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tf_mp import cores

__all__ = ["Facts", "gather"]

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Facts:
    """A set-up. Tests write broken ones down; `gather` reads the one at hand.

    Attributes:
        python: version of Python.
        tensorflow: version of TensorFlow, None when absent.
        keras: version of Keras, None when absent.
        horovod: version of Horovod, None when absent.
        horovod_tensorflow: version of the TensorFlow that Horovod was built against.
        horovod_parts: which of "mpi", "gloo" and "nccl" it was built with.
        mpirun: path of the first `mpirun`, None when absent.
        mpirun_version: what it says about itself.
        ssh: path of the ssh client, None when absent.
        rsh_agent: Open MPI's setting for starting ranks, as `/bin/false` without any client.
        compiler: path of a C++ compiler, None when absent.
        gpus: name of each GPU.
        peer_access: whether GPUs reach each other directly, None when unknown.
        cores: CPU cores that this process may use.
        threads: TensorFlow's threads by the environment, None when not set.
        memory_mib: memory that this process may use.
        shm_mib: size of /dev/shm, None when there is none.
        disk_mib: free space in the folder of the data.
        data_dir: folder of the data sets.
        data_sets: names of the data sets in it.
        environment: the environment variables.
    """

    python: str = ""
    tensorflow: str | None = None
    keras: str | None = None
    horovod: str | None = None
    horovod_tensorflow: str | None = None
    horovod_parts: tuple[str, ...] = ()
    mpirun: str | None = None
    mpirun_version: str = ""
    ssh: str | None = None
    rsh_agent: str = ""
    compiler: str | None = None
    gpus: tuple[str, ...] = ()
    peer_access: bool | None = None
    cores: int = 1
    threads: int | None = None
    memory_mib: int = 0
    shm_mib: int | None = None
    disk_mib: int = 0
    data_dir: str = ""
    data_sets: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def gather(data_dir: str | None = None) -> Facts:
    """Reads the set-up at hand; takes about a second."""
    from tf_mp import datasets

    folder = datasets.data_folder(data_dir)
    mpirun = shutil.which("mpirun")
    threads = os.environ.get("TF_NUM_INTRAOP_THREADS", "")
    return Facts(
        python=".".join(map(str, sys.version_info[:3])),
        tensorflow=_version("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "intel-tensorflow"),
        keras=_version("keras"),
        horovod=_version("horovod"),
        **_horovod(),
        mpirun=mpirun,
        mpirun_version=_output([mpirun, "--version"]).partition("\n")[0] if mpirun else "",
        ssh=shutil.which("ssh"),
        rsh_agent=_rsh_agent(),
        compiler=shutil.which("g++") or shutil.which("c++") or shutil.which("clang++"),
        gpus=_gpus(),
        peer_access=_peer_access(),
        cores=cores.share_of_rank(1),
        threads=int(threads) if threads.isdigit() else None,
        memory_mib=_memory_mib(),
        shm_mib=_size_mib("/dev/shm"),
        disk_mib=_free_mib(folder),
        data_dir=str(folder),
        data_sets=_data_sets(folder),
        environment=dict(os.environ),
    )


def _version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _horovod() -> dict[str, Any]:
    """What Horovod was built against and with, read from its files: importing it may crash."""
    found = importlib.util.find_spec("horovod")
    if found is None or not found.origin:
        return {}
    folder = Path(found.origin).parent
    libraries = sorted((folder / "tensorflow").glob("mpi_lib*.so"))
    code = libraries[0].read_bytes() if libraries else b""
    marks = {"mpi": b"libmpi.so", "gloo": b"N4gloo", "nccl": b"ncclAllReduce"}
    parts = tuple(name for name, mark in marks.items() if mark in code)
    try:
        built = json.loads((folder / "metadata.json").read_text()).get("tensorflow")
    except (OSError, ValueError):
        built = None
    return {"horovod_tensorflow": built, "horovod_parts": parts}


def _output(command: Sequence[str | None]) -> str:
    """What a command prints; empty when it fails."""
    try:
        return subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _rsh_agent() -> str:
    """Open MPI's launch agent, from the environment or its parameters file."""
    if "OMPI_MCA_plm_rsh_agent" in os.environ:
        return os.environ["OMPI_MCA_plm_rsh_agent"]
    mpirun = shutil.which("mpirun")
    files = [Path.home() / ".openmpi" / "mca-params.conf"]
    if mpirun:
        files.append(Path(mpirun).parents[1] / "etc" / "openmpi-mca-params.conf")
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition("=")
            if key.strip() == "plm_rsh_agent":
                return value.strip()
    return ""


def _gpus() -> tuple[str, ...]:
    """Lists GPUs by nvidia-smi, as far as CUDA_VISIBLE_DEVICES lets this process see them."""
    text = _output(["nvidia-smi", "--query-gpu=uuid,name", "--format=csv,noheader"])
    rows = [line.split(", ", 1) for line in text.splitlines() if ", " in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(name for _, name in rows)
    chosen = [word.strip() for word in visible.split(",") if word.strip()]
    names = {str(i): name for i, (_, name) in enumerate(rows)} | dict(rows)
    return tuple(names[word] for word in chosen if word in names)


def _peer_access() -> bool | None:
    """Whether all pairs of GPUs read each other's memory; None without a pair."""
    lines = _output(["nvidia-smi", "topo", "-p2p", "r"]).splitlines()
    rows = [line.split()[1:] for line in lines if line.startswith(("GPU", " GPU"))]
    cells = [cell for row in rows for cell in row if cell.isupper() and cell != "X"]
    states = [cell for cell in cells if not cell.startswith("GPU")]
    return all(state == "OK" for state in states) if states else None


def _memory_mib() -> int:
    """The smaller of the machine's memory and the control group's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limits.append(int((Path("/sys/fs/cgroup") / file).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits) // _MIB


def _size_mib(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total // _MIB
    except OSError:
        return None


def _free_mib(folder: Path) -> int:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(there).free // _MIB


def _data_sets(folder: Path) -> tuple[str, ...]:
    infos = folder.glob("*/*/dataset_info.json")
    return tuple(sorted({info.parent.parent.name for info in infos}))
