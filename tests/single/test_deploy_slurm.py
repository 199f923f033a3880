"""The batch script for Slurm, run by bash with its variables and stand-ins for its programs."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"

# Records how it was called; ends with RANKS_END at once, or runs until a signal that it notes.
STAND_IN = """#!/bin/bash
printf '%s\\n' "$0" "$@" >"$RECORD/{name}"
trap 'echo USR1 >>"$RECORD/signals"; exit 143' USR1
[ -n "${{RANKS_END:-}}" ] && exit "$RANKS_END"
while :; do sleep 0.05; done
"""
SCONTROL = '#!/bin/bash\necho "$@" >"$RECORD/scontrol"\n'


@pytest.fixture
def batch(tmp_path):
    """A function that starts a copy of the script as Slurm does: elsewhere, under another name."""
    programs, record, submitted = tmp_path / "bin", tmp_path / "record", tmp_path / "project"
    for folder in (programs, record, submitted):
        folder.mkdir()
    stand_ins = {name: STAND_IN.format(name=name) for name in ("mpirun", "srun")}
    for name, text in {**stand_ins, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    copy = tmp_path / "slurm_script"
    copy.write_text(SCRIPT.read_text())
    running = []

    def start(*arguments, **variables):
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record),
            "SLURM_SUBMIT_DIR": str(submitted), "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4",
            "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8", **variables,
        }
        process = subprocess.Popen(
            ["bash", str(copy), *arguments], env=environment, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start, record, submitted
    for process in running:
        process.kill()
        process.wait()


def words(file):
    return file.read_text().splitlines()


def wait_for(file):
    for _ in range(200):
        if file.exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{file} never came")


def test_mpirun_asks_slurm_for_hosts_and_ranks(batch):
    start, record, submitted = batch
    assert start("--steps", "7", RANKS_END="0").wait(30) == 0
    called = words(record / "mpirun")
    assert called[1:3] == [f"{submitted}/.venv/bin/python", f"{submitted}/scripts/train.py"]
    assert not {"-H", "-np", "-n", "--host", "--hostfile"} & set(called)
    assert called[-2:] == ["--steps", "7"]
    assert called[called.index("--stages") + 1] == "2"
    assert called[called.index("--checkpoint-dir") + 1] == f"{submitted}/runs/4711/checkpoints"
    assert not (record / "scontrol").exists()


def test_the_environments_own_mpirun_tells_other_hosts_where_it_lies(batch):
    start, record, submitted = batch
    own = submitted / ".venv" / "bin" / "mpirun"
    own.parent.mkdir(parents=True)
    own.write_text(STAND_IN.format(name="mpirun"))
    own.chmod(0o755)
    assert start(RANKS_END="0").wait(30) == 0
    assert words(record / "mpirun")[:3] == [str(own), "--prefix", f"{submitted}/.venv"]


def test_srun_starts_the_ranks_when_asked(batch):
    start, record, submitted = batch
    assert start(LAUNCHER="srun", RANKS_END="0").wait(30) == 0
    called = words(record / "srun")
    python = called.index(f"{submitted}/.venv/bin/python")
    assert called[1:python] == [
        "--mpi=pmix", "--gpu-bind=none", "--kill-on-bad-exit=1", "--cpus-per-task=8"
    ]
    assert not (record / "mpirun").exists()


@pytest.mark.parametrize(("gpus", "option"), [("4", ["--nv"]), ("0", [])])
@pytest.mark.parametrize("data", ["/my/sets", ""])
def test_ranks_run_in_an_apptainer_image_when_asked(batch, gpus, option, data):
    start, record, submitted = batch
    variables = {"SLURM_GPUS_ON_NODE": gpus, **({"DATA_DIR": data} if data else {})}
    assert start(CONTAINER="tf_mp.sif", RANKS_END="0", **variables).wait(30) == 0
    binds = f"{submitted}/runs/4711" + (f",{data}" if data else "")
    called = words(record / "mpirun")[1:]
    assert called[: called.index("--stages")] == [
        "apptainer", "exec", "--bind", binds, *option, "tf_mp.sif",
        "/opt/tf_mp/.venv/bin/python", "/opt/tf_mp/scripts/train.py",
    ]
    assert called[called.index("--data-dir") + 1] == (data or "/opt/tf_mp/data")
    assert called[called.index("--dataset") + 1] == "fashion_mnist"


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_usr1_saves_and_puts_the_job_back_into_the_queue(batch, launcher):
    start, record, _ = batch
    process = start(LAUNCHER=launcher)
    wait_for(record / launcher)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 143
    assert words(record / "signals") == ["USR1"]
    assert words(record / "scontrol") == ["requeue 4711"]


def test_a_cancelled_job_saves_and_stays_ended(batch):
    start, record, _ = batch
    process = start()
    wait_for(record / "mpirun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143
    assert words(record / "signals") == ["USR1"]
    assert not (record / "scontrol").exists()


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_failed_run_is_not_queued_again(batch, code):
    start, record, _ = batch
    assert start(RANKS_END=str(code)).wait(30) == code
    assert not (record / "scontrol").exists()


def test_another_launcher_is_refused(batch):
    start, _, _ = batch
    process = start(LAUNCHER="horovodrun")
    assert process.wait(30) == 2
    assert "it can be mpirun or srun" in process.stderr.read()


def test_files_of_a_run_are_not_readable_by_others(batch):
    start, _, submitted = batch
    assert start(RANKS_END="0").wait(30) == 0
    assert (submitted / "runs" / "4711").stat().st_mode & 0o077 == 0


def test_the_directives_fit_each_other():
    text = SCRIPT.read_text()
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    stages = int(re.search(r"STAGES:-(\d+)", text)[1])
    assert int(directives["gpus-per-node"]) == int(directives["ntasks-per-node"]) * stages
    assert directives["signal"] == "B:USR1@120"
    assert "requeue" in directives
    assert directives["open-mode"] == "append"
