"""The batch script with the real mpirun, which reads Slurm's variables and passes signals on."""

import os
import platform
import shutil
import signal
import subprocess
import sys

import pytest
from launching import ROOT

# Says which rank it is; at SIGUSR1 it ends as train.py does after a checkpoint.
TRAIN = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["RECORD"])
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(143))
rank, size = (os.environ["OMPI_COMM_WORLD_" + name] for name in ("RANK", "SIZE"))
(here / f"rank{rank}").write_text(size)
while "--stay" in sys.argv:
    time.sleep(0.05)
"""


@pytest.fixture
def batch(tmp_path):
    """A function that starts the script as on one host of Slurm's with three tasks."""
    record, programs, project = tmp_path / "record", tmp_path / "bin", tmp_path / "project"
    for folder in (record, programs, project / "scripts"):
        folder.mkdir(parents=True)
    (project / "scripts" / "train.py").write_text(TRAIN)
    (programs / "scontrol").write_text('#!/bin/sh\necho "$@" >"$RECORD/scontrol"\n')
    (programs / "scontrol").chmod(0o755)
    host = platform.node()
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS": "3",
        "SLURM_NODELIST": host, "SLURM_JOB_NODELIST": host, "SLURM_TASKS_PER_NODE": "3",
        "SLURM_SUBMIT_DIR": str(project), "VENV": sys.prefix, "RECORD": str(record),
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{programs}:{sys.prefix}/bin:{os.environ['PATH']}", "HOME": str(tmp_path),
    }

    def start(*arguments):
        script = shutil.copy(ROOT / "deploy" / "slurm" / "train.sbatch", tmp_path / "slurm_script")
        return subprocess.Popen(["bash", script, *arguments], env=slurm)

    return start, record


def test_mpirun_starts_a_rank_for_each_task(batch):
    start, record = batch
    assert start().wait(60) == 0
    assert {file.name: file.read_text() for file in record.iterdir()} == {
        "rank0": "3", "rank1": "3", "rank2": "3"
    }


def test_usr1_reaches_the_ranks_through_mpirun_and_the_job_is_queued_again(batch):
    start, record = batch
    process = start("--stay")
    for _ in range(600):
        if len(list(record.iterdir())) == 3:
            break
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 143
    assert (record / "scontrol").read_text() == "requeue 7\n"
