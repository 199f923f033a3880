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

SAMPLES, MICRO_BATCHES = 64, 8
MODEL = {"length": 128, "width": 256, "num_blocks": 8, "dropout": 0.0}
VARIANTS = [("gpipe", False), ("gpipe", True), ("1f1b", False), ("1f1b", True)]


def one(schedule, recompute, micro_batches):
    """Peak above the start and the plan's bytes, in MB."""
    import tf_mp

    tf_mp.init(devices_per_rank=2)
    import networks

    from tf_mp import models, plan, request

    model = tf_mp.parallelize(
        lambda: models.transformer(**MODEL), stages=2, cuts=["block4_norm1"],
        micro_batches=micro_batches, schedule=schedule, recompute=recompute,
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
        print("row:" + json.dumps(one(schedule, recompute == "1", int(count))))
        return
    # big blocks go back to the system at once, so that the peak is what is in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    found = {}
    for _ in range(args.rounds):
        for schedule, recompute in VARIANTS:
            words = f"{schedule},{int(recompute)},{MICRO_BATCHES}"
            done = subprocess.run(
                [sys.executable, __file__, "--here", words], env=environment,
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            row = json.loads(done.stdout.rpartition("row:")[2])
            found.setdefault(words, []).append(row)
    lines = [
        "| schedule | recompute | in flight | peak above the start, MB | planned, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rows in found.values():
        peaks, row = sorted(r["peak_mb"] for r in rows), rows[0]
        lines.append(
            f"| {row['schedule']} | {'yes' if row['recompute'] else 'no'} | "
            f"{' and '.join(map(str, row['in_flight']))} | {peaks[len(peaks) // 2]:.0f} "
            f"({peaks[0]:.0f} to {peaks[-1]:.0f}) | {row['planned_mb']:.0f} |"
        )
    text = (
        f"transformer {MODEL}, {SAMPLES} samples, {MICRO_BATCHES} micro-batches, two stages, "
        f"RMSprop. {harness.head(args.rounds, 3)}\n\n" + "\n".join(lines)
    )
    harness.write(FOLDER, "transformer", text, found)


if __name__ == "__main__":
    main()
