"""Which devices this rank owns, and how many threads; the only user of `tf.config`.

Every rank tells every other which GPUs it sees, by UUID, before TensorFlow initialises any. All
ranks then come to the same decision from the same table, so that an error is raised on all of
them. `CUDA_VISIBLE_DEVICES` is not asked: it may read the same in every task of a scheduler.
"""

import os
import socket
import sys
from collections.abc import Sequence

from tf_mp import cores, gpus, world

__all__ = ["init", "meet", "owned", "resolve"]

_owned: tuple[str, ...] = ()

_TOO_LATE = (
    "TensorFlow was initialised before tf_mp.init(). Expected: tf_mp.init() first. Move it above "
    "the first line that makes a tensor, a model or a dataset, or lists logical devices."
)
_PINNED = (
    "GPUs that the script narrowed itself before tf_mp.init(). Expected: all GPUs of this rank. "
    "Delete the line that pins one GPU by local_rank "
    "(`tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')`): tf_mp.init() does it."
)


def init(devices_per_rank: int | None = None) -> None:
    """Starts Horovod where it is installed, and takes this rank's devices and threads.

    With GPUs, stage s of a rank runs on physical GPU `local_rank * devices_per_rank + s` of those
    that the local ranks share, with memory that grows. Without GPUs the rank gets logical CPU
    devices. A second call with the same number does nothing.

    Args:
        devices_per_rank: devices of each rank. None: visible GPUs // local ranks, or 2 logical
            CPUs.

    Raises:
        ValueError: too few GPUs, ranks that found different kinds of devices, a Keras that is not
            TensorFlow's; on every rank.
        RuntimeError: TensorFlow was initialised already, with other devices.
    """
    global _owned
    if devices_per_rank is not None and devices_per_rank < 1:
        raise ValueError(f"Received: {devices_per_rank=}. Expected: at least 1, or None.")
    if _owned and devices_per_rank in (None, len(_owned)):
        return
    if _owned:
        raise RuntimeError(
            f"Received: {devices_per_rank=}. Expected: {len(_owned)}, as in the first "
            "tf_mp.init() of this process; start a new process for another number."
        )
    _check_keras()
    here = world.init()
    if here.size > 1:
        from tf_mp import stop

        stop.end_all_on_error()
    share = cores.share_of_rank(here.local_size)
    world.intra_op_threads = _intra_op(share, devices_per_rank or 2)
    table = world.exchange(_visible_gpus(), what="visible GPUs")
    mine = gpus.deal(table, devices_per_rank)[here.rank]
    num_devices = len(mine) or devices_per_rank or 2
    kind = "GPU" if mine else "CPU"
    names = tuple(f"/device:{kind}:{index}" for index in range(num_devices))
    _agree(names, _take(mine, num_devices, share))
    _owned = names
    world.say(_summary(here, share))


def meet() -> None:
    """What a rank that is under way does while ranks that join an elastic run call `init`.

    A rank keeps its devices: its number on its host stays, so new ranks take others.
    """
    world.exchange(_visible_gpus(), what="visible GPUs")
    _agree(_owned, None)


def _agree(names: tuple[str, ...], problem: str | None) -> None:
    """Ends on all ranks where one has a problem, or another kind of devices."""
    problems = world.exchange(problem, what="problems with devices")
    if any(problems):
        _raise(RuntimeError, problems)
    world.agree("device map", {f"stage {s}": name for s, name in enumerate(names)})


def owned() -> tuple[str, ...]:
    """The names of this rank's devices, such as `("/device:CPU:0", "/device:CPU:1")`.

    Names are local: TensorFlow numbers the devices of a process from 0. Without `init` they are
    the devices that TensorFlow has.
    """
    import tensorflow as tf

    if _owned:
        return _owned
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return tuple(device.name for device in devices)


def resolve(devices: Sequence[str]) -> tuple[str, ...]:
    """Checks names that a person wrote (`"/gpu:1"`, `"CPU:0"`) and returns their full form.

    Raises:
        ValueError: a device that this rank does not have.
    """
    full = []
    for name in devices:
        kind, _, index = name.lower().removeprefix("/").removeprefix("device:").partition(":")
        full.append(f"/device:{kind.upper()}:{index or 0}")
    missing = [name for name, known in zip(devices, full, strict=True) if known not in owned()]
    if missing:
        raise ValueError(
            f"Received: devices={list(devices)}. Expected: devices of this rank, which are "
            f"{list(owned())}; {missing} is not among them. Numbers are local to a rank: "
            "its first GPU is GPU:0, whichever card of the host that is."
        )
    return tuple(full)


def _take(places: list[int], num_devices: int, share: int) -> str | None:
    """Configures TensorFlow for this rank; returns what went wrong, in words, or None."""
    import tensorflow as tf

    if len(tf.config.get_visible_devices("GPU")) < len(tf.config.list_physical_devices("GPU")):
        return _PINNED
    try:
        _set_threads(share, num_devices)
        if not places:
            cpu = tf.config.list_physical_devices("CPU")[0]
            one = tf.config.LogicalDeviceConfiguration()
            tf.config.set_logical_device_configuration(cpu, [one] * num_devices)
            return None
        physical = [tf.config.list_physical_devices("GPU")[place] for place in places]
        tf.config.set_visible_devices(physical, "GPU")
        for gpu in physical:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        return _TOO_LATE
    return None


def _set_threads(share: int, num_devices: int) -> None:
    """Caps TensorFlow's threads, unless the user did: a logical CPU device is about one core."""
    import tensorflow as tf

    if "TF_NUM_INTRAOP_THREADS" not in os.environ:
        tf.config.threading.set_intra_op_parallelism_threads(_intra_op(share, num_devices))
    if "TF_NUM_INTEROP_THREADS" not in os.environ:
        tf.config.threading.set_inter_op_parallelism_threads(max(2, num_devices, share))


def _intra_op(share: int, num_devices: int) -> int:
    """Threads for one operation: OMP_NUM_THREADS, or this rank's cores over its devices."""
    for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return max(1, share // num_devices)


def _visible_gpus() -> list[str]:
    """The UUIDs of the GPUs that TensorFlow sees, in its order. Tests replace this function."""
    import tensorflow as tf

    found = tf.config.list_physical_devices("GPU")
    uuids = gpus.uuids() if found else []
    # Without a driver that answers, GPUs of one host are told apart by their number.
    known = len(uuids) == len(found)
    return uuids if known else [f"{socket.gethostname()} {gpu.name}" for gpu in found]


def _check_keras() -> None:
    """Refuses a Keras that does not compute with TensorFlow."""
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if "keras" in sys.modules:
        backend = sys.modules["keras"].config.backend()
    if backend != "tensorflow":
        raise ValueError(
            f"Received: the Keras backend {backend!r}. Expected: 'tensorflow'. Unset "
            "KERAS_BACKEND, or set it to tensorflow before Python starts."
        )
    if os.environ.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        raise ValueError(
            "Received: TF_USE_LEGACY_KERAS, which asks for Keras 2. Expected: Keras 3. Unset it."
        )


def _raise(kind: type[Exception], problems: Sequence[str | None]) -> None:
    """Raises one error with the problems of all ranks, each told once."""
    told: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem:
            told.setdefault(problem, []).append(rank)
    raise kind(" ".join(f"Received on ranks {ranks}: {text}" for text, ranks in told.items()))


def _summary(here: world.World, share: int) -> str:
    """One line about what this run stands on."""
    ranks = "1 rank" if here.size == 1 else f"{here.size} ranks"
    early = "TF_ENABLE_ONEDNN_OPTS" in os.environ
    late = "" if early else "; import tf_mp before keras for oneDNN"
    return f"{ranks}, each with {', '.join(_owned)} and {share} CPU cores{late}"
