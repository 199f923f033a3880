"""The discovery script offers slots in replicas: the GPUs of a host over the stages of a rank."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "discover_hosts.sh"
FOUR_GPUS = '#!/bin/sh\nfor n in 0 1 2 3; do echo "GPU $n: made up (UUID: GPU-$n)"; done\n'


@pytest.fixture
def run(tmp_path):
    """Runs the script on a host without GPUs, or with what a made-up nvidia-smi lists."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run_script(*, smi=None, **environment):
        if smi is not None:
            (programs / "nvidia-smi").write_text(smi)
            (programs / "nvidia-smi").chmod(0o755)
        path = f"{programs}:/usr/bin:/bin"
        return subprocess.run(
            ["bash", SCRIPT], capture_output=True, text=True, env={"PATH": path, **environment}
        )

    return run_script


def test_a_host_without_gpus_is_one_replica_or_as_many_as_asked(run):
    assert run().stdout == "localhost:1\n"
    assert run(CPU_SLOTS="3").stdout == "localhost:3\n"


def test_slots_are_gpus_over_stages(run):
    assert run(smi=FOUR_GPUS).stdout == "localhost:2\n"
    assert run(smi=FOUR_GPUS, STAGES="1").stdout == "localhost:4\n"
    assert run(smi=FOUR_GPUS, STAGES="3").stdout == "localhost:1\n"
    assert run(smi=FOUR_GPUS, CUDA_VISIBLE_DEVICES="0,2").stdout == "localhost:1\n"
    assert run(smi=FOUR_GPUS, CUDA_VISIBLE_DEVICES="-1").stdout == "localhost:1\n"


def test_the_hosts_of_a_file_have_their_own_number_or_as_many_as_this_one(run, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# all of them\none 8\ntwo  # as here\n\nthree 0\n")
    found = run(smi=FOUR_GPUS, TF_MP_HOSTS=os.fspath(hosts))
    assert found.stdout == "one:4\ntwo:2\nthree:1\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [("one 1", "Received: 1 GPUs on one and STAGES=2"), ("one x", "Received: x GPUs of one")],
)
def test_a_host_that_has_no_replica_is_an_error_with_its_name(run, tmp_path, line, words):
    (tmp_path / "hosts").write_text(f"two 2\n{line}\n")
    found = run(TF_MP_HOSTS=os.fspath(tmp_path / "hosts"))
    assert found.returncode == 1
    assert words in found.stderr


def test_a_file_that_is_not_there_is_an_error_with_its_name(run):
    found = run(TF_MP_HOSTS="/nowhere/hosts")
    assert found.returncode == 1
    assert "TF_MP_HOSTS=/nowhere/hosts" in found.stderr
