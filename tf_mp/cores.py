"""How many CPU cores a rank may use, by its affinity mask, its quota and its peers."""

import os
from pathlib import Path

__all__ = ["share_of_rank"]

_LAUNCHERS = {"mpirun", "mpiexec", "orterun", "orted", "prte", "prted", "horovodrun", "slurmstepd"}
_CGROUPS = Path("/sys/fs/cgroup")


def share_of_rank(local_size: int) -> int:
    """Returns the whole cores that one of `local_size` ranks of this host may use, at least 1.

    A quota is always shared. An affinity mask is shared unless the launcher bound each rank to
    cores of its own, which shows in a mask narrower than the launcher's.
    """
    mask = len(os.sched_getaffinity(0))
    cores = float(mask if _bound_by_launcher() else mask / local_size)
    quota = _quota()
    if quota is not None:
        cores = min(cores, quota / local_size)
    return max(1, int(cores))


def _bound_by_launcher() -> bool:
    """Whether this process has fewer cores than the launcher that started it."""
    pid = os.getppid()
    while pid > 1:
        try:
            # The name stands in brackets and may hold spaces; state and parent follow it.
            text = Path(f"/proc/{pid}/stat").read_text()
            name, _, rest = text.partition("(")[2].rpartition(")")
            if name in _LAUNCHERS:
                return os.sched_getaffinity(0) < os.sched_getaffinity(pid)
            pid = int(rest.split()[1])
        except OSError:
            return False
    return False


def _quota() -> float | None:
    """The cores that the control groups of this process allow, or None without a limit."""
    limits = [_read_quota(folder) for folder in _cgroup_folders()]
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroup_folders() -> list[Path]:
    """The folders of this process's control groups (version 1 and 2), up to the top."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            top = _CGROUPS / controllers
            own = top / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if parent.is_relative_to(top))]
    return folders


def _read_quota(folder: Path) -> float | None:
    """The quota of one control group in cores, or None."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
