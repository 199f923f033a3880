"""Measures the claims under benchmarks/ on this machine: `make bench`.

Each variant is a process of its own that waits for its turn; one runs at a time, in rounds (A B C
A B C ...), so that a noisy machine disturbs all alike. The table shows medians over the rounds and
the ratio to the first variant, round by round, with its 95 % interval (the order statistics of the
median, distribution free).
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "seed_network"
# name -> (stages or None for plain Keras, micro-batches, cores)
VARIANTS = {
    "plain Keras, 2 cores": (None, 1, 2),
    "plain Keras, 1 core": (None, 1, 1),
    "the usual idiom, 2 devices": ("idiom", 1, 2),
    "tf_mp, 1 stage, m = 1": (1, 1, 1),
    "tf_mp, 2 stages, m = 1": (2, 1, 2),
    "tf_mp, 2 stages, m = 2": (2, 2, 2),
    "tf_mp, 2 stages, m = 4": (2, 4, 2),
    "tf_mp, 2 stages, m = 8": (2, 8, 2),
}


def turn(name, batch_size):
    """The process of one variant: for each line with a number of steps, answers the ms a step."""
    import time

    import tf_mp

    stages, micro_batches, cores = VARIANTS[name]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    if isinstance(stages, int):
        os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
    tf_mp.init(devices_per_rank=2)
    import keras
    import numpy as np
    import tensorflow as tf

    if stages is None:
        model = tf_mp.build_model(devices=["/device:CPU:0"] * 2)
    elif stages == "idiom":
        model = tf_mp.build_model(devices=["/device:CPU:0", "/device:CPU:1"])
    else:
        cut = {"cuts": "scopes"} if stages == 2 else {"cuts": "auto", "stages": 1}
        model = tf_mp.parallelize(tf_mp.build_model, micro_batches=micro_batches, **cut)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(0.001), loss, metrics=["accuracy"])
    random = np.random.default_rng(0)
    images = random.random((batch_size, 28, 28, 1), np.float32)
    data = tf.data.Dataset.from_tensors((images, random.integers(0, 10, batch_size))).repeat()
    model.fit(data, steps_per_epoch=10, verbose=0)
    print("ready", flush=True)
    for line in sys.stdin:
        steps, start = int(line), time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        print((time.perf_counter() - start) / steps * 1e3, flush=True)


def measure(rounds, steps, batch_size):
    """For each variant its ms a step in each round."""
    processes = {}
    for name in VARIANTS:
        command = [sys.executable, __file__, "--turn", name, "--batch-size", str(batch_size)]
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if processes[name].stdout.readline().strip() != "ready":
            sys.exit(f"The variant {name!r} did not start; run: {' '.join(command)}")
    found = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, process in processes.items():
            print(steps, file=process.stdin, flush=True)
            found[name].append(float(process.stdout.readline()))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return found


def interval(values):
    """The 95 % interval of the median from the order statistics of a sorted sample."""
    ordered, count = sorted(values), len(values)
    reach = int(1.96 * count**0.5 / 2)
    middle = count // 2
    return ordered[max(0, middle - reach)], ordered[min(count - 1, middle + reach)]


def table(found, batch_size):
    """The results as a table in Markdown."""
    base = found[next(iter(found))]
    lines = [
        "| variant | ms a step | images a second | time to the first row, 95 % |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in found.items():
        median = statistics.median(values)
        ratios = [value / first for value, first in zip(values, base)]
        low, high = interval(ratios)
        lines.append(
            f"| {name} | {median:.1f} | {batch_size / median * 1e3:.0f} | "
            f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


def main():
    """Measures and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        return turn(args.turn, args.batch_size)
    found = measure(args.rounds, args.steps, args.batch_size)
    text = table(found, args.batch_size)
    versions = [importlib.metadata.version(name) for name in ("tensorflow_cpu", "keras")]
    head = (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, TensorFlow {versions[0]}, Keras {versions[1]}; "
        f"{args.rounds} rounds of {args.steps} steps, batch {args.batch_size}."
    )
    FOLDER.joinpath("results.md").write_text(f"{head}\n\n{text}\n")
    FOLDER.joinpath("results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{head}\n\n{text}")


if __name__ == "__main__":
    main()
