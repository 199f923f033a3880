"""What happens to one rank, and how all ranks end: two ranks, under MPI and Gloo.

Each row is a fault, the rank it strikes, the launcher, the exit codes that are right, words that
must be read, and the step whose checkpoint must be the newest (None: whatever there is).
Within 30 seconds of the fault the launcher has ended, and no process of the run is left.
The few rows of `TABLE` are always run; all of them where TF_MP_ALL_FAULTS is set (15 minutes),
which also writes docs/faults.md.
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from launching import Run, load

SCRIPT = Path(__file__).parent / "faulty.py"
MPI, GLOO = "mpirun", "horovodrun --gloo"
ANY = range(1, 256)
KEY = "KeyError: 'the cause'"
SAVING = "signal on ranks [{}]: saving"
ALL = "TF_MP_ALL_FAULTS" in os.environ

TABLE = [
    ("exception", 1, MPI, ANY, KEY, 3),
    ("settings", 1, MPI, ANY, "rank 1 has fault=True where rank 0 has False", None),
    ("SIGKILL", 0, GLOO, ANY, "", 3),
    ("SIGTERM", 1, MPI, [143], SAVING.format(1), 6),
]
MORE = [
    ("exception", 0, MPI, ANY, KEY, 3),
    ("exception", 1, GLOO, ANY, KEY, 3),
    ("before the start", 1, MPI, ANY, KEY, None),
    ("settings", 1, GLOO, ANY, "rank 1 has fault=True where rank 0 has False", None),
    ("data", 1, MPI, ANY, "Received: no data. Expected: some.", None),
    ("download", 0, MPI, ANY, "Rank 0: Cannot import", None),
    ("download", 0, GLOO, ANY, "Rank 0: Cannot import", None),
    ("steps", 1, MPI, ANY, "the steps of an epoch that differs between ranks", None),
    ("steps", 1, GLOO, ANY, "the steps of an epoch that differs between ranks", None),
    ("unknown length", 1, MPI, ANY, "data of unknown length on 2 ranks", None),
    ("nan", 1, MPI, ANY, "not finite on ranks", 3),
    ("nan", 1, GLOO, ANY, "not finite on ranks", 3),
    ("disk", 0, MPI, ANY, "File exists, while writing the checkpoint of step 3", None),
    ("early stopping", 1, MPI, [0], "all steps done", 5),
    ("early stopping", 1, GLOO, [0], "all steps done", 5),
    ("exit 0", 1, MPI, ANY, "", 3),
    ("exit 0", 1, GLOO, ANY, "", 3),
    ("sys.exit", 1, MPI, ANY, "", 3),
    ("evaluation", 1, MPI, ANY, KEY, 40),
    ("SIGKILL", 0, MPI, ANY, "", 3),
    ("SIGKILL", 1, MPI, ANY, "", 3),
    ("SIGKILL", 1, GLOO, ANY, "", 3),
    ("SIGSEGV", 1, MPI, ANY, "", 3),
    ("SIGTERM", 0, GLOO, ANY, SAVING.format(0), 6),
    ("SIGUSR1", 0, MPI, [143], SAVING.format(0), 6),
    ("SIGUSR1", 1, GLOO, ANY, SAVING.format(1), 6),
    ("SIGINT", 1, MPI, [130], SAVING.format(1), 6),
    ("none", 1, MPI, [0], "all steps done", 40),
]
WORDS = {
    "exception": "an exception in a callback",
    "before the start": "an exception before Horovod starts",
    "settings": "other settings than rank 0",
    "data": "no data",
    "download": "data that cannot be had",
    "steps": "a step less of data",
    "unknown length": "data of unknown length",
    "nan": "a loss that is no number",
    "disk": "a checkpoint folder that cannot be written",
    "early stopping": "told to stop early",
    "exit 0": "leaves with exit code 0",
    "sys.exit": "sys.exit(3) in a callback",
    "evaluation": "an exception before the evaluation",
    "none": "no fault",
}


def newest(folder):
    """The step of the newest checkpoint, or None."""
    states = [json.loads(path.read_text()) for path in folder.glob("step-*/state.json")]
    return max((state["step"] for state in states), default=None)


def wanted(codes):
    return "not 0" if codes is ANY else " or ".join(map(str, codes))


@pytest.mark.parametrize(
    ("fault", "rank", "launcher", "codes", "words", "step"), [*TABLE, *MORE] if ALL else TABLE
)
def test_a_fault_of_one_rank_ends_all(tmp_path, faults, fault, rank, launcher, codes, words, step):
    with Run(
        SCRIPT, fault, rank, tmp_path, ranks=2, launcher=launcher, log=tmp_path / "log"
    ) as run:
        run.wait()
        ended = time.time()
        orphans = run.orphans()
    struck = re.search(r"FAULT ([\d.]+)", run.output)
    seconds = ended - float(struck[1]) if struck else None
    shown = "at the start" if seconds is None else f"{seconds:.1f}"
    shown = "-" if fault == "none" else shown
    found = newest(tmp_path)
    faults.add(WORDS.get(fault, fault), rank, launcher, wanted(codes), run.code, shown,
               len(orphans), found or "-")
    assert run.code in codes, run.output
    assert words in run.output
    assert not orphans, run.output
    assert run.output.count("all steps done") == (2 if 0 in codes else 0)
    assert seconds is None or seconds < 30 * load()
    assert step is None or found == step, run.output


STOPS = [("horovodrun", signal.SIGTERM)]
if ALL:
    STOPS += [(MPI, signal.SIGUSR1), (MPI, signal.SIGTERM), (MPI, signal.SIGINT),
              (GLOO, signal.SIGTERM), (GLOO, signal.SIGINT), ("horovodrun", signal.SIGINT)]


@pytest.mark.parametrize(("launcher", "number"), STOPS)
def test_a_stopped_launcher_leaves_a_checkpoint_and_no_rank(tmp_path, faults, launcher, number):
    """Ctrl-C goes to all processes of a terminal's foreground, other signals to the launcher."""
    with Run(
        SCRIPT, "stopped from outside", 1, tmp_path, ranks=2, launcher=launcher,
        log=tmp_path / "log",
    ) as run:
        run.wait_for(lambda: "step 5 of rank 1" in run.output)
        send = os.killpg if number == signal.SIGINT else os.kill
        send(run.process.pid, number)
        start = time.monotonic()
        code = run.wait(30 * load())
        seconds = time.monotonic() - start
        orphans = run.orphans(30 * load())
        left = time.monotonic() - start
    words = f"{seconds:.1f}" if left - seconds < 5 else f"{seconds:.1f} (ranks {left:.1f})"
    faults.add(f"{number.name} to the launcher", "-", launcher, "not 0", code, words,
               len(orphans), newest(tmp_path) or "-")
    assert not orphans, run.output
    assert code != 0
    assert "saving and leaving with exit code" in run.output
    assert newest(tmp_path) >= 5, run.output
