"""Peak memory of one process by schedule and recomputation, beside what `tf-mp plan` says.

Each variant is a process: its resident memory before the first step is its start, the peak is
read from Linux's VmHWM, which is reset after the first step (tracing does not count). Both stages
lie in one process, so the plan's bytes of both stages are added up.
"""

import json
import os
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402

MODEL = {"length": 128, "width": 256, "num_blocks": 8, "dropout": 0.0}
#: What activations take: one model, by schedule and recomputation.
ACTIVATIONS = [
    ("transformer", schedule, recompute, 8)
    for schedule in ("gpipe", "1f1b")
    for recompute in (False, True)
]
#: What gradients take: weights that are large beside the activations, by micro-batches.
GRADIENTS = [("mlp", schedule, False, m) for schedule in ("gpipe", "1f1b") for m in (1, 2, 4, 8)]
TABLES = {"transformer": ACTIVATIONS, "mlp": GRADIENTS}
SAMPLES = 64
TITLES = {
    "transformer": f"transformer {MODEL}, {SAMPLES} samples, two stages, RMSprop",
    "mlp": f"twelve dense layers of 1024, {SAMPLES} samples, two stages, RMSprop",
}


def one(name, schedule, recompute, micro_batches):
    """Peak above the start and the plan's bytes, in MB."""
    import tf_mp

    tf_mp.init(devices_per_rank=2)
    import networks

    from tf_mp import models, plan, request

    build, cuts = {
        "transformer": (lambda: models.transformer(**MODEL), ["block4_norm1"]),
        "mlp": (networks.mlp, networks.network("mlp", 1).cuts),
    }[name]
    model = tf_mp.parallelize(
        build, stages=2, cuts=cuts, micro_batches=micro_batches, schedule=schedule,
        recompute=recompute,
    )  # fmt: skip
    request.compile_if_needed(model)
    batch = request.random_batch(model, SAMPLES)
    data = networks.endless(batch)
    start = status("VmRSS")
    model.fit(data, steps_per_epoch=1, verbose=0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    model.fit(data, steps_per_epoch=3, verbose=0)
    peak = status("VmHWM") - start
    planned = plan.plan(tf_mp.pipeline_of(model), SAMPLES, repeats=1)
    stages = [stage.bytes for stage in planned.stages]
    return {
        "schedule": schedule,
        "recompute": recompute,
        "micro_batches": micro_batches,
        "peak_mb": peak,
        "planned_mb": sum(b.total - b.weights for b in stages) / 1e6,
        "gradients_mb": sum(b.gradients for b in stages) / 1e6,
        "in_flight": [b.in_flight for b in stages],
    }


def status(word):
    """A size of this process in MB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(word + ":"):
            return int(line.split()[1]) / 1e3
    raise ValueError(word)


def main():
    """Runs the variants, in turns."""
    options = harness.parser(__doc__.splitlines()[0], rounds=3)
    options.add_argument("--here", help="schedule,recompute,micro-batches")
    args = options.parse_args()
    if args.here:
        schedule, recompute, count = args.here.split(",")
        print("row:" + json.dumps(one(args.only, schedule, recompute == "1", int(count))))
        return
    for name in [args.only] if args.only else TABLES:
        found = rows(name, args.rounds)
        text = f"{TITLES[name]}. {harness.head(args.rounds, 3)}\n\n{table(found)}"
        harness.write(FOLDER, name, text, found)


def rows(name, rounds):
    """The rows of each variant of one model, measured in turns."""
    # big blocks go back to the system at once, so that the peak is what is in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    found = {}
    for _ in range(rounds):
        for _, schedule, recompute, micro_batches in TABLES[name]:
            words = f"{schedule},{int(recompute)},{micro_batches}"
            done = subprocess.run(
                [sys.executable, __file__, "--only", name, "--here", words], env=environment,
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"{words} failed:\n{done.stderr[-3000:]}")
            found.setdefault(words, []).append(json.loads(done.stdout.rpartition("row:")[2]))
    return found


def table(found):
    """One row a variant, in Markdown."""
    lines = [
        "| schedule | recompute | micro-batches | in flight | one copy of the gradients, MB | "
        "peak above the start, MB | planned, MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rows_ in found.values():
        peaks, row = sorted(r["peak_mb"] for r in rows_), rows_[0]
        lines.append(
            f"| {row['schedule']} | {'yes' if row['recompute'] else 'no'} | "
            f"{row['micro_batches']} | {' and '.join(map(str, row['in_flight']))} | "
            f"{row['gradients_mb']:.0f} | {peaks[len(peaks) // 2]:.0f} "
            f"({peaks[0]:.0f} to {peaks[-1]:.0f}) | {row['planned_mb']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
