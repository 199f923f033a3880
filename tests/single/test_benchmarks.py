"""What the benchmarks are measured with: turns, stopped processes, ratios, tables."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PROGRAM = """
import sys, time
sys.path.insert(0, {folder!r})
import harness
def train(steps):
    time.sleep({seconds} * steps)
harness.serve(train)
"""
FAILING = "raise SystemExit('no such network')"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import harness

    return harness


def variant(harness, name, seconds):
    text = PROGRAM.format(folder=str(BENCHMARKS), seconds=seconds)
    return harness.Variant(name, [sys.executable, "-c", text])


def test_variants_take_turns_and_are_stopped_in_between(harness):
    both = [variant(harness, "quick", 0.01), variant(harness, "slow", 0.05)]
    states = []

    class Watched:
        name = "watched"

        def start(self):
            pass

        def turn(self, steps):
            time.sleep(0.1)  # a signal takes its time
            states.append([harness.psutil.Process(v._process.pid).status() for v in both])
            return 1.0

        def end(self):
            pass

    found = harness.measure([*both, Watched()], 3, 2)
    assert {name: len(values) for name, values in found.items()} == {
        "quick": 3, "slow": 3, "watched": 3,
    }  # fmt: skip
    assert all(value >= 10 for value in found["quick"])  # milliseconds a step
    assert all(value >= 50 for value in found["slow"])
    assert states == [["stopped", "stopped"]] * 4
    assert all(v._process.returncode is not None for v in both)


def test_a_variant_that_fails_ends_the_benchmark_with_its_words(harness):
    failing = harness.Variant("failing", [sys.executable, "-c", FAILING])
    with pytest.raises(SystemExit, match="no such network"):
        failing.start()


def test_ratios_are_taken_round_by_round_with_the_interval_of_their_median(harness):
    base = [float(n) for n in range(1, 16)]
    values = [2 * n for n in base]
    assert harness.ratio(values, base) == (2.0, 2.0, 2.0)
    # as in tables of the sign test: 15 values, 96.5 %; 21 values, 97.3 %; 6 values, 96.9 %
    assert harness.interval(base) == (4.0, 12.0)
    assert harness.interval(list(range(1, 22))) == (6, 16)
    assert harness.interval(list(range(1, 7))) == (1, 6)
    assert harness.interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    [*_, row] = harness.table({"a": base, "b": values}, 100).splitlines()
    assert row.startswith("| b | 16.0 | 8.0 to 24.0 | 6250 | 2.000 (2.000 to 2.000) |")


def test_every_folder_has_a_readme_and_tables_have_their_turns():
    folders = [path for path in BENCHMARKS.iterdir() if (path / "run.py").exists()]
    assert len(folders) >= 8
    for folder in folders:
        assert "make bench" in (folder / "README.md").read_text(), folder
        for table in folder.glob("results_*.md"):
            assert json.loads(table.with_suffix(".json").read_text()), table


def test_an_unknown_benchmark_is_named():
    words = [sys.executable, ROOT / "scripts" / "bench.py", "nowhere"]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "Received nowhere. Expected some of balance, " in ran.stdout
