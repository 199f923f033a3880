"""Who this process is among the ranks, and how the ranks agree; valid without Horovod.

Everything that ranks tell each other here is small and goes as JSON text through one Horovod
allgather of bytes (their lengths may differ), never as a pickle. It runs in a TensorFlow session
of its own, on the CPU: a session does not initialise TensorFlow's eager devices, so ranks can
compare what they found *before* `devices.py` chooses devices.
"""

import functools
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["World", "agree", "broadcast", "current", "exchange", "init", "say"]

# The size that each kind of launcher announces to the processes that it starts.
_LAUNCHER_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

intra_op_threads = 0
"""Threads for one operation; `devices.init` sets it before the first exchange (0: TensorFlow's
own choice), because the first session of a process fixes the pool for all later ones."""


@dataclass(frozen=True)
class World:
    """This process among all processes of the run; one plain process is a world of one.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes (the world size).
        local_rank: number of this process on its host, from 0.
        local_size: number of processes on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_root(self) -> bool:
        """Whether this is the root rank, which writes files and speaks for all."""
        return self.rank == 0


def init() -> World:
    """Starts Horovod where it is installed and returns this process's place among the ranks.

    Raises:
        RuntimeError: a launcher started several processes but Horovod is missing, cannot be
            loaded, or sees another number of ranks.
    """
    prepare_environment()
    launched = _launched_size()
    if importlib.util.find_spec("horovod") is None:
        if launched > 1:
            raise RuntimeError(
                f"Received: {launched} processes from the launcher. Expected: Horovod to connect "
                f"them, but it is not installed for {sys.executable}. Run `make setup` with that "
                "Python, or start one plain process."
            )
        return World()
    try:
        import horovod.tensorflow as horovod

        if not horovod.is_initialized():
            horovod.init()
    except ImportError as error:
        return _without_horovod(launched, error)
    world = current()
    # Under the elastic launcher the number has changed since it started this process, perhaps.
    if launched > 1 and world.size != launched and "HOROVOD_ELASTIC" not in os.environ:
        raise RuntimeError(
            f"Received: a launcher that started {launched} processes, but Horovod sees "
            f"{world.size}. Expected: the same number. Start the job with `horovodrun`, `mpirun` "
            "or `srun --mpi=pmix`, all from the Open MPI that Horovod was built with."
        )
    return world


def _without_horovod(launched: int, error: ImportError) -> World:
    """One plain process goes on without a Horovod that does not load, and says so."""
    if launched > 1:
        raise RuntimeError(
            f"Received: {launched} processes from the launcher, and a Horovod that does not load "
            f"({error}). Expected: one built for this TensorFlow; `tf-mp doctor` names both."
        ) from error
    say(f"Horovod is installed but does not load ({error}): this process is a world of one.")
    return World()


def prepare_environment() -> None:
    """Sets what Open MPI reads when it starts, where the user has not set it.

    PyPI's Open MPI looks for its files where it was built. A launcher tells its processes where
    they really are; a plain process must be told through `OPAL_PREFIX` or it aborts. Nor does a
    plain process need a daemon of Open MPI beside it. Ranks that wait must yield: they would take
    the cores from the others. And a rank that waits in vain, for longer than any first trace or
    checkpoint takes, ends instead of waiting for ever.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "900")
    prefix = Path(sys.prefix)
    if _launched_size() == 0:
        os.environ.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
        if any(prefix.glob("lib/libmpi.so*")):
            os.environ.setdefault("OPAL_PREFIX", str(prefix))


def _launched_size() -> int:
    """The number of processes that a launcher announces; 0 without a launcher."""
    sizes = [os.environ[name] for name in _LAUNCHER_SIZES if name in os.environ]
    return max((int(size) for size in sizes if size.isdigit()), default=0)


def current() -> World:
    """This process's place among the ranks; reads Horovod's state and never starts it."""
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is None or not horovod.is_initialized():
        return World()
    return World(
        horovod.rank(), horovod.size(), horovod.local_rank(), horovod.local_size()
    )


def say(text: str) -> None:
    """Prints one line for the whole run: on the root rank, to the error stream."""
    if current().is_root:
        print(f"tf_mp: {text}", file=sys.stderr, flush=True)


def exchange(value: Any, *, what: str = "a value") -> list[Any]:
    """Gives every rank the value of each rank, in rank order. Every rank must call it.

    Args:
        value: anything that JSON can hold.
        what: what is exchanged, in words; the same on every rank.

    Raises:
        RuntimeError: ranks that exchange different things, on every rank.
    """
    frame = json.dumps([what, value], sort_keys=True)
    frames = [frame] if current().size == 1 else _channel()(frame.encode()).splitlines()
    pairs = [json.loads(text) for text in frames]
    if any(label != what for label, _ in pairs):
        labels = ", ".join(f"rank {rank}: {pair[0]}" for rank, pair in enumerate(pairs))
        raise RuntimeError(f"Received: ranks at different places of the program ({labels}).")
    return [item for _, item in pairs]


@functools.cache
def _channel() -> Callable[[bytes], bytes]:
    """Returns a function that joins one line of every rank, in rank order."""
    import horovod.tensorflow as horovod
    import numpy as np
    import tensorflow as tf

    settings = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0}, intra_op_parallelism_threads=intra_op_threads
    )
    graph = tf.Graph()
    with graph.as_default():
        line = tf.compat.v1.placeholder(tf.uint8, [None])
        joined = horovod.allgather(line, name="tf_mp_exchange")
    session = tf.compat.v1.Session(graph=graph, config=settings)

    def join(text: bytes) -> bytes:
        sent = np.frombuffer(text + b"\n", np.uint8)
        return bytes(session.run(joined, {line: sent}).tobytes())

    return join


def broadcast(value: Any, *, what: str = "the root's value") -> Any:
    """Gives every rank the root's value; the other ranks' values are not looked at."""
    return exchange(value if current().is_root else None, what=what)[0]


def agree(what: str, value: Any) -> None:
    """Checks that every rank holds the same value; every rank must call it.

    Args:
        what: what is compared, in words.
        value: anything that JSON can hold.

    Raises:
        ValueError: on every rank, naming the ranks that differ from the root and, for
            dictionaries, the entries that differ.
    """
    values = exchange(value, what=what)
    others = {rank: found for rank, found in enumerate(values) if found != values[0]}
    if others:
        differences = "; ".join(
            f"rank {rank} has {_difference(found, values[0])}" for rank, found in others.items()
        )
        raise ValueError(
            f"Received: {what} that differs between ranks: {differences}. Expected: the same on "
            f"all {len(values)} ranks. Start every rank with the same command and installation."
        )


def _difference(found: Any, root: Any) -> str:
    """Words for how one rank's value differs from the root's."""
    if not (isinstance(found, dict) and isinstance(root, dict)):
        return f"{found!r} where rank 0 has {root!r}"
    keys = sorted(key for key in {*found, *root} if found.get(key) != root.get(key))
    pairs = [(key, found.get(key), root.get(key)) for key in keys]
    return ", ".join(f"{key}={ours!r} where rank 0 has {its!r}" for key, ours, its in pairs)
