"""Which physical GPUs belong to which rank: decided by all ranks alike, from UUIDs."""

import ctypes
from collections.abc import Sequence
from typing import Any

__all__ = ["deal", "uuids"]


def deal(table: Sequence[list[str]], devices_per_rank: int | None) -> list[list[int]]:
    """Deals GPUs to ranks; a pure function of what every rank sees, so all decide alike.

    Args:
        table: for each rank, the UUIDs of the GPUs it sees, in its own order; ranks that see the
            same ones share them.
        devices_per_rank: how many each rank needs; None shares all of them out evenly.

    Returns:
        For each rank the positions in its own list, in stage order; all [] when nobody sees a GPU.

    Raises:
        ValueError: some ranks see none, two ranks see partly the same, or there are too few.
    """
    if not any(table):
        return [[] for _ in table]
    blind = [rank for rank, gpus in enumerate(table) if not gpus]
    if blind:
        raise ValueError(
            f"Received: no GPU on ranks {blind}, while the others have some. Expected: the same "
            "kind of device on every rank. Give those ranks GPUs, or run on CPUs everywhere with "
            "CUDA_VISIBLE_DEVICES=-1."
        )
    chosen = []
    for gpus in table:
        sharers = [rank for rank, others in enumerate(table) if set(others) & set(gpus)]
        if any(set(table[rank]) != set(gpus) for rank in sharers):
            raise ValueError(
                f"Received: ranks {sharers} see partly the same GPUs. Expected: the same set, or "
                "sets apart. Set CUDA_VISIBLE_DEVICES alike for all ranks of a host."
            )
        chosen.append((sharers, devices_per_rank or len(gpus) // len(sharers)))
    _check_numbers(table, chosen)
    places = []
    for rank, (sharers, number) in enumerate(chosen):
        start = sharers.index(rank) * number
        # One order for all who share, the first one's: theirs may differ.
        mine = table[sharers[0]][start : start + number]
        places.append([table[rank].index(uuid) for uuid in mine])
    return places


def _check_numbers(table: Sequence[list[str]], chosen: list[tuple[list[int], int]]) -> None:
    """Raises when a host has too few GPUs or hosts give their ranks different numbers."""
    for gpus, (sharers, number) in zip(table, chosen, strict=True):
        needed = max(number, 1) * len(sharers)
        if needed > len(gpus):
            fits = len(gpus) // max(number, 1)
            each = len(gpus) // len(sharers)
            fewer = f"start {fits} on that host (`-np` and slots count ranks, not GPUs)"
            smaller = f"give each rank {each} (`init(devices_per_rank={each})`, `--stages {each}`)"
            remedies = " or ".join([fewer] * bool(fits) + [smaller] * bool(each))
            raise ValueError(
                f"Received: {len(gpus)} visible GPUs for {len(sharers)} ranks on one host (ranks "
                f"{sharers}). Expected: {max(number, 1)} for each, {needed} in all; {remedies}."
            )
    numbers = sorted({number for _, number in chosen})
    if len(numbers) > 1:
        raise ValueError(
            f"Received: hosts whose ranks would get {numbers} GPUs each. Expected: one number. "
            f"Say which: init(devices_per_rank={numbers[0]})."
        )


def uuids() -> list[str]:
    """The UUIDs of the visible GPUs, asked from the CUDA driver, which counts as TensorFlow does.

    Opens no device; [] where no driver answers.
    """
    try:
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, uuid = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(count.value):
        failed = driver.cuDeviceGet(ctypes.byref(device), index)
        if failed or driver.cuDeviceGetUuid(uuid, device):
            return []
        found.append(uuid.raw.hex())
    return found
