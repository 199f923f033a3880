"""The set-up says in one sentence what is missing, and leaves what is not its own alone."""

import os
import pathlib
import platform
import shutil
import subprocess
import sys
from hashlib import sha256

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TOOLS = (
    "bash sh env dirname basename cat cut sha256sum df awk sed grep tr head tail mkdir touch "
    "mktemp rm ls cp mv cmp find uname getconf nproc tar sleep id xargs sort ln chmod"
).split()


class Machine:
    """A machine with few programs: a folder of links is all of its PATH."""

    def __init__(self, folder):
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        self.venv = folder / "venv"
        self.environment = {
            "PATH": str(self.programs),
            "HOME": str(folder),
            "VENV": str(self.venv),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "DATA_DIR": str(folder / "data"),
            "DEVICE": "cpu",
            # a registry that does not answer, asked once
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_RETRIES": "0",
        }
        for tool in TOOLS:
            (self.programs / tool).symlink_to(shutil.which(tool))

    def add(self, name, script):
        path = self.programs / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def add_python(self):
        self.add("python3", f'exec {sys.executable} "$@"')

    def add_compiler(self):
        self.add("g++", "exit 0")
        self.add("make", "exit 0")

    def set_up(self, **variables):
        return run_bootstrap({**self.environment, **variables})


def run_bootstrap(environment):
    command = ["bash", str(ROOT / "scripts" / "bootstrap.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def sentence_of(result):
    """The one sentence on stderr of a set-up that failed."""
    assert result.returncode != 0, result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("tf_mp: ")]
    assert len(lines) == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


def test_a_machine_without_python_is_told_which_ones_will_do(machine):
    sentence = sentence_of(machine.set_up())
    assert "3.11, 3.12, 3.13" in sentence and "PYTHON=" in sentence


def test_an_unsupported_python_is_named_with_what_will_do(machine):
    machine.add("python3.9", "echo 3.9")
    sentence = sentence_of(machine.set_up(PYTHON="python3.9"))
    assert "PYTHON=python3.9 is Python 3.9" in sentence and "3.11, 3.12, 3.13" in sentence
    assert not machine.venv.exists()


def test_an_unsupported_python3_is_passed_over_for_one_that_will_do(machine):
    machine.add("python3", "echo 3.9")
    machine.add("python3.12", '[ "$1" = -m ] && exit 3; echo 3.12')
    machine.add_compiler()
    result = machine.set_up()
    assert "with python3.12 (Python 3.12)" in result.stdout


def test_a_python_that_does_not_run_is_named(machine):
    assert "PYTHON=/no/such does not run" in sentence_of(machine.set_up(PYTHON="/no/such"))


def test_a_python_without_its_venv_module_is_told_what_to_install(machine):
    fails = 'mkdir -p "$3/bin"; echo "ensurepip is not available"; exit 1'
    machine.add("python3", f'if [ "$1" = -m ]; then {fails}; fi; echo 3.11')
    machine.add_compiler()
    sentence = sentence_of(machine.set_up())
    assert "apt-get install python3.11-venv" in sentence
    # what it left is no obstacle to the next try
    assert sentence_of(machine.set_up()) == sentence


def test_no_compiler_is_said_before_anything_is_downloaded(machine):
    machine.add_python()
    result = machine.set_up()
    assert "apt-get install g++" in sentence_of(result)
    assert not machine.venv.exists()


def test_no_registry_and_a_wheelhouse_with_holes_are_said_with_the_way_around(machine):
    machine.add_python()
    machine.add_compiler()
    sentence = sentence_of(machine.set_up())
    assert "registry did not answer" in sentence and "WHEELHOUSE=DIR" in sentence
    # the environment is as it was: a second try goes on from there
    again = machine.set_up()
    assert "making the environment" not in again.stdout
    assert "registry did not answer" in sentence_of(again)
    # so does a set-up from a wheelhouse, here one that holds nothing
    wheelhouse = machine.programs.parent / "wheelhouse"
    (wheelhouse / "wheels").mkdir(parents=True)
    about = f"python={VERSION}\ndevice=cpu\nmpi=pypi\nmachine={platform.machine()}\n"
    (wheelhouse / "about").write_text(about)
    (wheelhouse / "SHA256SUMS").write_text(f"{sha256(about.encode()).hexdigest()}  about\n")
    sentence = sentence_of(machine.set_up(WHEELHOUSE=str(wheelhouse)))
    assert "lacks a package" in sentence and "make wheelhouse" in sentence


def test_an_environment_that_was_left_half_made_is_made_anew(machine):
    machine.add("python3", '[ "$1" = -m ] && exit 3; echo 3.11')
    machine.add_compiler()
    (machine.venv / ".tf_mp").mkdir(parents=True)
    (machine.venv / "bin").mkdir()
    (machine.venv / "bin" / "python").symlink_to(machine.programs / "python3")
    for mark in ("made", "busy", "wheels.done"):
        (machine.venv / ".tf_mp" / mark).touch()
    result = machine.set_up()
    assert "stopped half-way; making it anew" in result.stdout
    assert not (machine.venv / "bin").exists()


def test_a_full_disk_is_said_with_what_is_needed(machine):
    machine.add_python()
    machine.add_compiler()
    machine.add("df", "echo Filesystem; echo x 9 9 102400 1% /")
    sentence = sentence_of(machine.set_up())
    assert "100 MB free" in sentence and "needs 1500" in sentence and "VENV=DIR" in sentence


def test_a_folder_that_is_no_environment_is_left_alone(machine):
    machine.add_python()
    machine.venv.mkdir()
    (machine.venv / "letter.txt").write_text("mine")
    assert "delete it, or choose another place" in sentence_of(machine.set_up())
    assert (machine.venv / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [("DEVICE", "tpu", "cpu or gpu"), ("MPI", "mpich", "it can be system")],
)
def test_an_unknown_setting_is_named_with_what_it_can_be(machine, variable, value, wanted):
    sentence = sentence_of(machine.set_up(**{variable: value}))
    assert f"Received {variable}={value}" in sentence and wanted in sentence


def test_a_second_set_up_of_this_environment_does_nothing():
    state = pathlib.Path(sys.prefix) / ".tf_mp"
    if not (state / "project.done").exists() or not state.is_relative_to(ROOT):
        pytest.skip("this environment was not made by `make setup` in this checkout")
    before = {path.name: path.stat().st_mtime_ns for path in state.iterdir()}
    result = run_bootstrap({**os.environ, "VENV": sys.prefix})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1 and "ready" in result.stdout
    assert before == {path.name: path.stat().st_mtime_ns for path in state.iterdir()}
