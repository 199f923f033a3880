"""Runs a script as ranks of a launcher, and sees how the run ended and whether anyone was left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
_MARK = "TF_MP_TEST_RUN"
_NOT_OURS = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "OPAL_", "TF_NUM_", "COV_")


def load():
    """How much slower than a machine without other work this one is now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Run:
    """One run of a script by several ranks, or in one plain process.

    Attributes:
        output: what all ranks printed, once the run has ended.
        code: exit code of the launcher.
    """

    def __init__(self, *command, ranks=1, launcher=None, log, **environment):
        self.mark = uuid.uuid4().hex
        self._log = Path(log)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_OURS)}
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        ours = {"PATH": path, "PYTHONPATH": str(ROOT), _MARK: self.mark}
        words = [*_launch(launcher, ranks), sys.executable, "-u", *map(str, command)]
        self.start = time.monotonic()
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=ROOT, env={**inherited, **ours, **environment}, start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in [*self.living(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    @property
    def output(self):
        return self._log.read_text(errors="replace")

    @property
    def code(self):
        return self.process.returncode

    def wait(self, seconds=600):
        """Waits for the end and returns the exit code; a run that hangs is an error."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None

    def wait_for(self, happened, seconds=240):
        """Waits until something is true, or the run has ended."""
        limit = time.monotonic() + seconds
        while not happened():
            assert self.process.poll() is None, f"ended too early:\n{self.output}"
            assert time.monotonic() < limit, f"waited {seconds} s in vain:\n{self.output}"
            time.sleep(0.1)

    def living(self):
        """The process ids of everything that this run started and that still lives."""
        return [pid for pid, _ in _processes(self.mark)]

    def rank(self, number):
        """The process id of one rank."""
        for pid, environment in _processes(self.mark):
            for name in ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"):
                if environment.get(name) == str(number) and _is_python(pid):
                    return pid
        raise AssertionError(f"no rank {number}:\n{self.output}")

    def orphans(self, seconds=5):
        """What still lives a little after the end of the launcher."""
        limit = time.monotonic() + seconds
        while self.living() and time.monotonic() < limit:
            time.sleep(0.1)
        return self.living()


def _launch(launcher, ranks):
    """The words before the script; a list of words stays what it is."""
    if launcher is None:
        return []
    if isinstance(launcher, list):
        return launcher
    if launcher == "mpirun":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *as_root, "-np", str(ranks), "--bind-to", "none", "--tag-output"]
    return ["horovodrun", *launcher.split()[1:], "-np", str(ranks)]


def _processes(mark):
    """Process ids and environments of all processes with our mark (a zombie has none)."""
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit():
                continue
            entries = folder.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        if environment.get(_MARK) == mark:
            yield int(folder.name), environment


def _is_python(pid):
    return Path(f"/proc/{pid}/comm").read_text().startswith("python")
