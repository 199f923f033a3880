"""Runs this process on a part of its cores for a while, as a device does beside the others.

Logical CPU devices share one pool of threads. While an operation is timed alone, the parts of its
backward that do not depend on each other would spread over all cores; in the pipeline the other
devices need those. So it is timed on the cores that are left to one device.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tf_mp import cores, world

__all__ = ["cores_of_device", "limited_to"]


def cores_of_device(device: str, num_devices: int) -> int | None:
    """The cores that one of so many CPU devices of this rank has to itself; None for a GPU."""
    if "CPU" not in device.upper() or num_devices < 1:
        return None
    return max(1, cores.share_of_rank(world.current().local_size) // num_devices)


@contextlib.contextmanager
def limited_to(num_cores: int | None) -> Iterator[None]:
    """Keeps every thread of this process on the first `num_cores` of its cores in this block.

    Args:
        num_cores: How many cores; None, or more than there are, changes nothing. Nor does it on
            systems without affinity masks.
    """
    if num_cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    own = os.sched_getaffinity(0)
    before = {thread: mask for thread in _threads() if (mask := _mask(thread))}
    narrow = set(sorted(own)[:num_cores])
    try:
        _set(dict.fromkeys(before, narrow))
        yield
    finally:
        # Threads that were started in the block inherited its mask.
        _set({thread: before.get(thread, own) for thread in _threads()})


def _threads() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _mask(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return None


def _set(masks: dict[int, set[int]]) -> None:
    for thread, mask in masks.items():
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(thread, mask)
