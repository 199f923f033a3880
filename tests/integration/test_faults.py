"""The fault table: what happens to one rank, and how all ranks end. Two ranks, MPI and Gloo.

Each row is a fault, the rank it strikes, the launcher, the exit codes that are right, words that
must be read, and the step whose checkpoint must be the newest (None: whatever there is).
Within 30 seconds of the fault the launcher has ended, and no process of the run is left.
The rows of `MORE` are of the same kinds; they run where TF_MP_ALL_FAULTS is set (six minutes).
"""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from launching import Run

SCRIPT = Path(__file__).parent / "faulty.py"
MPI, GLOO = "mpirun", "horovodrun --gloo"
ANY = range(1, 256)
LOAD = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
"""How much slower than a machine without other work this one is."""

TABLE = [
    ("exception", 1, MPI, ANY, "KeyError: 'the cause'", 3),
    ("exception", 1, GLOO, ANY, "KeyError: 'the cause'", 3),
    ("settings", 1, MPI, ANY, "rank 1 has fault=True where rank 0 has False", None),
    ("steps", 1, MPI, ANY, "the steps of an epoch that differs between ranks", None),
    ("nan", 1, MPI, ANY, "not finite on ranks", 3),
    ("disk", 0, MPI, ANY, "File exists, while writing the checkpoint of step 3", None),
    ("SIGKILL", 1, MPI, ANY, "", 3),
    ("SIGKILL", 0, GLOO, ANY, "", 3),
    ("SIGTERM", 1, MPI, [143], "signal on ranks [1]: saving", 6),
    ("SIGUSR1", 1, GLOO, ANY, "signal on ranks [1]: saving", 6),
]
MORE = [
    ("exception", 0, MPI, ANY, "KeyError: 'the cause'", 3),
    ("before the start", 1, MPI, ANY, "KeyError: 'the cause'", None),
    ("data", 1, MPI, ANY, "Received: no data. Expected: some.", None),
    ("unknown length", 1, MPI, ANY, "data of unknown length on 2 ranks", None),
    ("exit 0", 1, MPI, ANY, "", 3),
    ("exit 0", 1, GLOO, ANY, "", 3),
    ("sys.exit", 1, MPI, ANY, "", 3),
    ("evaluation", 1, MPI, ANY, "KeyError: 'the cause'", 40),
    ("SIGKILL", 0, MPI, ANY, "", 3),
    ("SIGKILL", 1, GLOO, ANY, "", 3),
    ("SIGSEGV", 1, MPI, ANY, "", 3),
    ("SIGTERM", 0, GLOO, ANY, "signal on ranks [0]: saving", 6),
    ("SIGUSR1", 0, MPI, [143], "signal on ranks [0]: saving", 6),
    ("SIGINT", 1, MPI, [130], "signal on ranks [1]: saving", 6),
]
ROWS = [*TABLE, *MORE] if "TF_MP_ALL_FAULTS" in os.environ else TABLE
LAUNCHERS = [MPI, "horovodrun", GLOO]


def newest(folder):
    """The step of the newest checkpoint, or None."""
    states = [json.loads(path.read_text()) for path in folder.glob("step-*/state.json")]
    return max((state["step"] for state in states), default=None)


@pytest.fixture(scope="module")
def seen(pytestconfig):
    """Collects the rows of the table and prints it at the end."""
    rows = []
    yield rows
    head = ("fault", "rank", "launcher", "exit code", "seconds", "left", "checkpoint")
    with pytestconfig.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print()
        for row in [head, *rows]:
            print("".join(f"{cell!s:<18}" for cell in row))


@pytest.mark.parametrize(("fault", "rank", "launcher", "codes", "words", "step"), ROWS)
def test_a_fault_of_one_rank_ends_all(tmp_path, seen, fault, rank, launcher, codes, words, step):
    with Run(
        SCRIPT, fault, rank, tmp_path, ranks=2, launcher=launcher, log=tmp_path / "log"
    ) as run:
        run.wait()
        ended = time.time()
        orphans = run.orphans()
    struck = re.search(r"FAULT ([\d.]+)", run.output)
    seconds = ended - float(struck[1]) if struck else None
    shown = "before it" if seconds is None else f"{seconds:.1f}"
    seen.append((fault, rank, launcher, run.code, shown, len(orphans), newest(tmp_path)))
    assert run.code in codes, run.output
    assert words in run.output
    assert not orphans, run.output
    assert "all steps done" not in run.output
    assert seconds is None or seconds < 30 * LOAD
    assert step is None or newest(tmp_path) == step, run.output


def test_without_a_fault_all_ranks_come_to_the_end(tmp_path):
    with Run(SCRIPT, "none", 1, tmp_path, ranks=2, launcher=MPI, log=tmp_path / "log") as run:
        assert run.wait() == 0, run.output
    assert run.output.count("all steps done") == 2
    assert newest(tmp_path) == 40


@pytest.mark.parametrize(
    ("launcher", "number"),
    [(launcher, number) for number in (signal.SIGTERM, signal.SIGINT) for launcher in LAUNCHERS]
    if "TF_MP_ALL_FAULTS" in os.environ
    else [(MPI, signal.SIGTERM), ("horovodrun", signal.SIGTERM)],
)
def test_a_stopped_launcher_leaves_a_checkpoint_and_no_rank(tmp_path, launcher, number):
    with Run(
        SCRIPT, "stopped from outside", 1, tmp_path, ranks=2, launcher=launcher,
        log=tmp_path / "log",
    ) as run:
        run.wait_for(lambda: "step 5 of rank 1" in run.output)
        os.kill(run.process.pid, number)
        code = run.wait(30 * LOAD)
        assert not run.orphans(30 * LOAD), run.output
    assert code != 0
    assert "saving and leaving with exit code" in run.output
    assert newest(tmp_path) >= 5, run.output
