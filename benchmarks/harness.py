"""Measures variants in rounds: A B C A B C ..., so that a noisy machine disturbs all alike.

Each variant is a command of its own, one process or several ranks. It waits for its turn, and
between its turns all of its processes are stopped (SIGSTOP), so that nothing that waits takes time
from the one that is measured. A turn is some training steps; its answer is milliseconds a step.
"""

import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import psutil

__all__ = [
    "Variant",
    "affinity",
    "head",
    "interval",
    "measure",
    "mpirun",
    "parser",
    "serve",
    "table",
    "write",
]

_READY_SECONDS = 600


class Variant:
    """One thing to measure: a name and the command that trains it.

    Args:
        name: as it stands in the table.
        command: the program and its arguments; it must call `serve`.
        environment: what it has in addition to this process's environment.
    """

    def __init__(self, name, command, environment=None):
        self.name, self.command = name, [str(word) for word in command]
        self._turns = pathlib.Path(tempfile.mkdtemp(prefix="turns-")) / "turns"
        self._turns.touch()
        self._log = tempfile.TemporaryFile("w+")
        self._environment = {**os.environ, "TURNS": str(self._turns), **(environment or {})}

    def start(self):
        """Starts it, waits until it is ready, and stops it."""
        self._process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=self._environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._answer("ready")
        self._each("suspend")

    def turn(self, steps):
        """Lets it make some steps; milliseconds a step."""
        self._each("resume")
        self._write(str(steps))
        value = float(self._answer("ms"))
        self._each("suspend")
        return value

    def end(self):
        """Ends all of its processes, at once: ranks that leave in good order wait for others."""
        self._each("kill")
        self._process.wait(60)
        shutil.rmtree(self._turns.parent)

    def _write(self, line):
        with self._turns.open("a") as file:
            file.write(line + "\n")

    def _answer(self, word):
        for line in self._process.stdout:
            head, _, rest = line.rpartition(f"{word}:")
            if _:
                return rest.strip()
        self._log.seek(0)
        sys.exit(
            f"The variant {self.name!r} ended before it answered {word!r}: "
            f"{' '.join(self.command)}\n{self._log.read()[-3000:]}"
        )

    def _each(self, verb):
        processes = [psutil.Process(self._process.pid)]
        processes += processes[0].children(recursive=True)
        for process in processes:
            getattr(process, verb)()


def serve(train, rank=0):
    """The loop of a measured process, until it is killed; the root rank answers.

    Args:
        train: called with a number of steps; returns when they are done.
        rank: number of this process among those of the variant.
    """
    turns = pathlib.Path(os.environ["TURNS"])
    if rank == 0:
        print("ready:", flush=True)
    done = 0
    while True:
        lines = turns.read_text().splitlines(keepends=True)
        if len(lines) <= done or not lines[done].endswith("\n"):
            time.sleep(0.002)
            continue
        line = lines[done].strip()
        done += 1
        start = time.perf_counter()
        train(int(line))
        if rank == 0:
            print(f"ms:{(time.perf_counter() - start) / int(line) * 1e3}", flush=True)


def affinity(cores):
    """Keeps this process on its first so many cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


def mpirun(ranks, command, **settings):
    """The words that start ranks under Open MPI, with its parameters as settings."""
    words = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-np", str(ranks), "-x", "TURNS"]
    for name, value in settings.items():
        words += ["--mca", name, str(value)]
    return [*words, *command]


def measure(variants, rounds, steps):
    """For each variant's name its milliseconds a step, one number a round.

    Args:
        variants: in the order of the table.
        rounds: how many.
        steps: of each turn, or a function from a variant's name to them.
    """
    for variant in variants:
        print(f"starting {variant.name}", file=sys.stderr, flush=True)
        variant.start()
    found = {variant.name: [] for variant in variants}
    for number in range(rounds + 1):  # the first round is a warm-up and is not counted
        for variant in variants:
            value = variant.turn(steps)
            print(f"{value:9.1f} ms  {variant.name}", file=sys.stderr, flush=True)
            if number:
                found[variant.name].append(value)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    for variant in variants:
        variant.end()
    return found


def interval(values):
    """The 95 % interval of the median from the order statistics of a sample.

    From the k-th smallest to the k-th largest value, with the largest k for which fewer than k of
    the values lie on one side of the median with a probability of at most 2.5 % (binomial
    distribution). Of fewer than six values it is the whole range, and holds with less certainty.
    """
    ordered, count = sorted(values), len(values)
    tail, k = 1, 0  # tail: of 2 ** count outcomes those with at most k values on one side
    while 2 * tail <= 0.05 * 2**count:
        k += 1
        tail += math.comb(count, k)
    k = max(k, 1)
    return ordered[k - 1], ordered[-k]


def ratio(values, base):
    """Median and 95 % interval of values[i] / base[i]."""
    ratios = [value / first for value, first in zip(values, base, strict=True)]
    return statistics.median(ratios), *interval(ratios)


def table(found, samples, base=None):
    """The results in Markdown: medians, and the ratio round by round to one variant.

    Args:
        found: what `measure` gives.
        samples: of one step.
        base: the variant that the others are compared with; the first by default.
    """
    base = base or next(iter(found))
    lines = [
        f"| variant | ms a step | spread | samples a second | time to `{base}`, 95 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, values in found.items():
        median = statistics.median(values)
        quartiles = statistics.quantiles(values, n=4)
        middle, low, high = ratio(values, found[base])
        lines.append(
            f"| {name} | {median:.1f} | {quartiles[0]:.1f} to {quartiles[2]:.1f} | "
            f"{samples / median * 1e3:.0f} | {middle:.3f} ({low:.3f} to {high:.3f}) |"
        )
    return "\n".join(lines)


def head(rounds, steps):
    """Date, machine and versions in a line."""
    names = ("tensorflow_cpu", "tensorflow", "keras", "horovod")
    versions = [f"{name} {found}" for name in names if (found := _version(name))]
    return (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({_processor()}), Python "
        f"{platform.python_version()}, {', '.join(versions)}; {rounds} rounds of {steps} steps "
        "after one that does not count; spread: first to third quartile."
    )


def write(folder, name, text, found):
    """Writes a table as `results_<name>.md` and each turn as JSON; prints the table."""
    print(text)
    folder.joinpath(f"results_{name}.md").write_text(text + "\n")
    folder.joinpath(f"results_{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def parser(description, rounds=15, steps=5):
    """The options that all have."""
    import argparse

    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--steps", type=int, default=steps, help="steps of a turn")
    made.add_argument("--only", metavar="NETWORK", help="one network instead of all")
    return made


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
