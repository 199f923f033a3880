"""A wheelhouse is checked before anything is installed from it."""

import os
import pathlib
import platform
import subprocess
import sys
from hashlib import sha256

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


WHEEL = "wheels/horovod-0.28.1-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def wheelhouse(tmp_path):
    folder = tmp_path / "wheelhouse"
    (folder / "wheels").mkdir(parents=True)
    (folder / "data" / "digits").mkdir(parents=True)
    (folder / WHEEL).write_bytes(b"a wheel")
    (folder / "data" / "digits" / "train").write_bytes(b"digits")
    python = "%d.%d" % sys.version_info[:2]
    about = f"python={python}\ndevice=cpu\nmpi=pypi\nmachine={platform.machine()}\n"
    (folder / "about").write_text(about)
    sums = ""
    for name in ("about", "data/digits/train", WHEEL):
        sums += f"{sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
    (folder / "SHA256SUMS").write_text(sums)
    return folder


def set_up(tmp_path, wheelhouse, **variables):
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "VENV": str(tmp_path / "venv"),
        "DATA_DIR": str(tmp_path / "data"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "WHEELHOUSE": str(wheelhouse),
        "DEVICE": "cpu",
        "MPI": "",
        **variables,
    }
    command = ["bash", str(ROOT / "scripts" / "bootstrap.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_damaged_file_is_named_and_nothing_is_made(tmp_path, wheelhouse):
    (wheelhouse / "data" / "digits" / "train").write_bytes(b"digit5")
    result = set_up(tmp_path, wheelhouse)
    assert result.returncode != 0
    assert "damaged or missing: data/digits/train " in result.stderr
    assert not (tmp_path / "venv").exists()


def test_a_missing_file_is_named(tmp_path, wheelhouse):
    (wheelhouse / "data" / "digits" / "train").unlink()
    result = set_up(tmp_path, wheelhouse)
    assert result.returncode != 0 and "damaged or missing: data/digits/train " in result.stderr


def test_a_folder_that_is_no_wheelhouse_is_named(tmp_path):
    result = set_up(tmp_path, tmp_path / "nothing")
    assert result.returncode != 0 and "is no wheelhouse" in result.stderr


def test_a_wheelhouse_for_another_python_is_refused(tmp_path, wheelhouse):
    about = (wheelhouse / "about").read_text()
    (wheelhouse / "about").write_text(about.replace("python=3.1", "python=3.0"))
    result = set_up(tmp_path, wheelhouse)
    assert result.returncode != 0 and "was made for python=3.0" in result.stderr
