"""Elastic runs whose ranks die and join, beside the undisturbed run.

    python tests/integration/elastic_runs.py [FOLDER]

runs `scripts/train.py` for 40 steps undisturbed, then with ranks 2 -> 1 -> 2 -> 1, then with a
third rank that joins (8 micro-batches over 3 ranks) and dies, and prints how far the weights are
apart. About ten minutes on two cores.
"""

import json
import sys
import tempfile
from pathlib import Path

import few_images
import keras
import numpy as np
from launching import Run

SCRIPT = Path(__file__).parent / "traced_train.py"
HOSTS = """#!/bin/sh
echo localhost:1
echo 127.0.0.1:1
test ! -e {file} || echo "$(uname -n):{new}"
"""
OPTIONS = ["--batch-size", "8", "--micro-batches", "4", "--optimizer", "adam", "--steps", "40"]
SHOWS = {
    "2 -> 1 -> 2 -> 1": (1, [["kill", 9, 2, 0], ["join", 15, 1], ["kill", 27, 2, 1]]),
    "2 -> 3 -> 2": (1, [["join", 6, 2], ["kill", 20, 3, 1]]),
}


def elastic(folder, events, new, *options):
    """A run under the elastic launcher; after the first "join" this host offers `new` ranks."""
    number = [kind for kind, *_ in events].index("join")
    hosts = folder / "hosts.sh"
    hosts.write_text(HOSTS.format(file=folder / f"event-{number}", new=new))
    hosts.chmod(0o755)
    launcher = "horovodrun --gloo --network-interfaces lo --gloo-timeout-seconds 300 --min-np 1 "
    launcher += f"--max-np 3 --host-discovery-script {hosts}"
    return Run(
        SCRIPT, folder, json.dumps(events), "--elastic", *options, ranks=2, launcher=launcher,
        log=folder / "log",
    )


def trace(folder):
    """For each step, micro-batch and stage the digest of what it got and drew.

    What a lost step did is done again, by another rank perhaps: it must be the same.
    """
    found = {}
    for path in folder.glob("trace-*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # A kill cuts the last line.
                *place, digest = json.loads(line)
                assert found.setdefault(tuple(place), digest) == digest, place
    return found


def weights(folder, step):
    """The weights in a checkpoint."""
    model = keras.models.load_model(folder / f"step-{step:08d}" / "model.keras")
    return [variable.numpy() for variable in model.weights]


def furthest(one, other):
    """The largest difference of any entry of two lists of arrays."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def main(folder):
    """Runs all, prints a line each, and fails where one is not the undisturbed run."""
    images = few_images.prepare(folder)
    plain = folder / "undisturbed"
    plain.mkdir()
    options = [*OPTIONS, *images, "--checkpoint-dir"]
    with Run(
        SCRIPT, plain, "[]", *options, plain / "saved", ranks=2, launcher="mpirun",
        log=plain / "log",
    ) as run:
        assert run.wait() == 0, run.output
    for name, (new, events) in SHOWS.items():
        here = folder / name.replace(" ", "").replace(">", "")
        here.mkdir()
        with elastic(
            here, events, new, "--commit-every", "3", *options, here / "saved"
        ) as run:
            assert run.wait(1200) == 0, run.output
            assert not run.orphans(), run.output
        assert len(list(here.glob("event-*"))) == len(events), run.output
        assert trace(here) == trace(plain)
        apart = furthest(weights(plain / "saved", 40), weights(here / "saved", 40))
        print(f"{name}: {len(trace(here))} micro-batches and stages with the same samples and "
              f"keys; weights at most {apart:.1e} apart", flush=True)
        assert apart < 1e-4


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
