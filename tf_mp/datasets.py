"""Where data sets lie: TFDS's folders. Looking into them needs neither TensorFlow nor TFDS."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["DataError", "data_folder", "find"]

_VERSION = re.compile(r"\d+\.\d+\.\d+")
_NAME = re.compile(r"[a-z]\w*(/[\w.+-]+)?(:\d+\.\d+\.\d+)?")


class DataError(RuntimeError):
    """A data set is not here and cannot be had; the message says what to put where."""


def data_folder(data_dir: str | Path | None = None) -> Path:
    """The folder of all data sets: as given, else TFDS's own default."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(data_dir or default).expanduser().absolute()


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder of a prepared set, the newest version of it; None where there is none.

    Args:
        name: as TFDS writes it: `mnist`, `mnist:3.0.1`, `emnist/letters`.
        data_dir: the folder of all data sets; by default TFDS's own.

    Raises:
        DataError: the name is none of TFDS, files of the set are missing, or it has several
            configurations.
    """
    if not _NAME.fullmatch(name):
        raise DataError(
            f"Received the data set {name!r}. Expected a name as TFDS writes it: 'mnist', "
            "'mnist:3.0.1', 'emnist/letters'."
        )
    base, _, version = name.partition(":")
    root = data_folder(data_dir) / base
    found = _versions(root.glob(f"{version or '*'}/dataset_info.json"))
    configs = {path.parent for path in _versions(root.glob("*/*/dataset_info.json"))}
    if not found and len(configs) > 1:
        names = ", ".join(sorted(f"{base}/{path.name}" for path in configs))
        raise DataError(
            f"Received the data set {name!r}, prepared in several kinds. Name one: {names}."
        )
    if not found and configs and not version:
        found = _versions(configs.pop().glob("*/dataset_info.json"))
    if not found:
        return None
    _check_whole(found[-1])
    return found[-1]


def _versions(infos: Iterable[Path]) -> list[Path]:
    paths = [path.parent for path in infos if _VERSION.fullmatch(path.parent.name)]
    return sorted(paths, key=lambda path: [int(part) for part in path.name.split(".")])


def _check_whole(path: Path) -> None:
    """TFDS moves whole sets only, but a person may have copied half of one."""
    info = json.loads((path / "dataset_info.json").read_text())
    wanted = sum(len(split.get("shardLengths", [])) for split in info.get("splits", []))
    there = len(list(path.glob("*-of-*")))
    if there < wanted:
        raise DataError(
            f"Received {path} with {there} data file(s). Expected {wanted}, as its "
            "dataset_info.json says: the set was copied in part. Copy it again, or delete the "
            "folder to prepare it anew."
        )
