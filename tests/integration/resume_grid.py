"""From every way to spread the work to every other: the losses after a resume are the same.

    python tests/integration/resume_grid.py [FOLDER]

trains ten steps in each way, resumes each in each, and prints as tables how far the losses of the
next steps are from those of the run that went on undisturbed. Beside RMSProp's, which are chaotic,
stands how far runs are apart that differ in nothing but the order of their sums over the
micro-batches. About eight minutes on two cores.
"""

import json
import sys
import tempfile
from pathlib import Path

import few_images
from launching import Run

SCRIPT = Path(__file__).parent / "resume_turn.py"
#: (stages, micro-batches of a rank, ranks), four micro-batches in all.
WAYS = [(1, 4, 1), (2, 2, 2), (2, 4, 1), (3, 4, 1)]
OPTIMIZERS = ["adam", "rmsprop"]


def name_of(way):
    return "-".join(map(str, way))


def turn(folder, way, steps, *sources):
    """Runs one turn to its end and returns its losses."""
    stages, micro_batches, ranks = way
    kind = "-order" if sources and sources[0].startswith("order:") else "-to" if sources else ""
    name = f"{name_of(way)}{kind}"
    with Run(
        SCRIPT, stages, micro_batches, folder, steps, ",".join(OPTIMIZERS), *sources,
        ranks=ranks, launcher="mpirun" if ranks > 1 else None, log=folder / f"log-{name}",
    ) as run:
        assert run.wait(1200) == 0, run.output
    return json.loads((folder / f"losses-{name}.json").read_text())


def furthest(one, other, steps):
    """The largest difference within the first steps."""
    return max(abs(a - b) for a, b in zip(one[:steps], other[:steps]))


def spread(runs, steps):
    """The largest difference between any two of several runs within the first steps."""
    return max(max(values) - min(values) for values in list(zip(*runs))[:steps])


def tables(undisturbed, resumed, orders):
    """The grid of each optimizer in Markdown."""
    lines = []
    for optimizer in OPTIMIZERS:
        for steps in (5, 20):
            lines += ["", f"{optimizer}, the next {steps} losses", ""]
            lines.append("| from \\ to | " + " | ".join(map(str, WAYS)) + " | order of sums |")
            lines.append("| --- " * (len(WAYS) + 2) + "|")
            for source in map(name_of, WAYS):
                row = [
                    furthest(undisturbed[source][optimizer], resumed[t][optimizer][source], steps)
                    for t in map(name_of, WAYS)
                ]
                summed = [undisturbed[source][optimizer], *orders[optimizer][source]]
                row.append(spread(summed, steps))
                start = f"| ({source.replace('-', ', ')}) | "
                lines.append(start + " | ".join(f"{v:.1e}" for v in row) + " |")
    return "\n".join(lines)


def check(undisturbed, resumed, orders):
    """Fails where a loss is further off than promised."""
    worst = widest = 0.0
    for source, before in undisturbed.items():
        widest = max(widest, spread([before["rmsprop"], *orders["rmsprop"][source]], 20))
        for after in resumed.values():
            for optimizer in OPTIMIZERS:
                assert furthest(before[optimizer], after[optimizer][source], 5) < 1e-5
            assert furthest(before["adam"], after["adam"][source], 20) < 1e-5
            worst = max(worst, furthest(before["rmsprop"], after["rmsprop"][source], 20))
    assert worst <= widest, f"rmsprop: {worst:.1e} apart, the order of sums gives {widest:.1e}"


def main(folder):
    """The whole grid."""
    few_images.prepare(folder)
    undisturbed = {name_of(way): turn(folder, way, 20) for way in WAYS}
    sources = ",".join(undisturbed)
    resumed = {name_of(way): turn(folder, way, 20, sources) for way in WAYS}
    orders = turn(folder, WAYS[0], 20, f"order:{sources}")
    print(tables(undisturbed, resumed, orders), flush=True)
    check(undisturbed, resumed, orders)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
