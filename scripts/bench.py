"""Measures the claims under benchmarks/ on this machine: `make bench`.

Each folder there has a script `run.py`, which rewrites the tables beside it. Names of folders may
be given; all run by default.
"""

import pathlib
import subprocess
import sys

CLAIMS = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


def main(names):
    """Runs the scripts one after another; the exit code is the number that failed."""
    known = {script.parent.name: script for script in sorted(CLAIMS.glob("*/run.py"))}
    wrong = [name for name in names if name not in known]
    if wrong:
        print(f"Received {', '.join(wrong)}. Expected some of {', '.join(known)}.")
        return 2
    failed = 0
    for name in names or known:
        print(f"--- {name}", flush=True)
        failed += subprocess.run([sys.executable, known[name]]).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
