"""The fault table: its rows come from several tests; shown at the end of the run, and kept."""

import datetime
import os
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "faults.md"
HEAD = ("fault", "rank", "launcher", "expected", "seen", "seconds", "left", "checkpoint", "on")
KEYS = 3
"""So many cells tell which row it is."""
COMMAND = "tests/integration/test_faults.py tests/integration/test_two_hosts.py"
TEXT = """# What happens when something goes wrong

Written by runs of

```
TF_MP_ALL_FAULTS=1 python -m pytest {command}
```

on 2 cores without a GPU, which had other work to do. Two ranks of two stages train, with a
checkpoint every 3 steps (every 5 on two hosts). The fault happens to the rank named, after its
fifth step unless it says when.

- *expected* and *seen*: the exit code of the launcher; "not 0" is any other code. A row is green
  only if the cause is in the output, too.
- *seconds*: from the fault to the end of the launcher. "at the start": before the first step.
- *left*: processes of the run that lived on.
- *checkpoint*: the step of the newest whole checkpoint.
- *on*: the day. A row that is run again takes the place of the older one.

Under `mpirun` most of the seconds are twice `odls_base_sigkill_timeout` (5 s, one of the settings
in `<environment>/etc/openmpi-mca-params.conf`), the time that Open MPI leaves the other ranks to
end by themselves.

{table}
"""


class Table:
    """Rows of cells, as they come in."""

    def __init__(self, rows=()):
        self.rows = list(rows)

    def add(self, *cells):
        row = [*map(str, cells), datetime.date.today().isoformat()]
        assert len(row) == len(HEAD)
        self.rows.append(row)

    def lines(self):
        widths = [max(map(len, column)) for column in zip(HEAD, *self.rows)]
        for row in [HEAD, ["-" * width for width in widths], *self.rows]:
            yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |"

    def kept_with(self, file):
        """The rows of a file, the new ones in the place of the same older ones."""
        lines = file.read_text().splitlines() if file.exists() else []
        cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines
                 if line.startswith("| ")]
        rows = {tuple(row[:KEYS]): row for row in [*cells[2:], *self.rows]}
        return Table(rows.values())


@pytest.fixture(scope="session")
def faults(pytestconfig):
    """The table, to which tests add their rows."""
    table = Table()
    yield table
    with pytestconfig.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("", *table.lines(), sep="\n")
    if "TF_MP_ALL_FAULTS" in os.environ:
        lines = "\n".join(table.kept_with(FILE).lines())
        FILE.write_text(TEXT.format(command=COMMAND, table=lines))
