"""What `tf-mp plan` predicts beside what is measured, for the zoo at two stages.

A row: predicted and measured milliseconds a step; what the timeline says; the bytes of weights and
slots predicted and really there. A round is the stages alone, a turn of `fit`, and in every third
a plan before and a timeline and a turn of `fit` after, so that a machine that changes its pace
disturbs all alike.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402
import networks  # noqa: E402

# name -> (samples, arguments of the builder): enough work that a step is not all dispatch
MODELS = {
    "mnist_cnn": (100, {}),
    "mlp": (512, {}),
    "transformer": (32, {"width": 256}),
    "lstm": (64, {"width": 256, "length": 32}),
    "unet": (32, {"size": 64, "width": 16}),
    "two_in_two_out": (4096, {"width": 512}),
    "vgg16": (16, {}),
    "resnet50": (16, {}),
}
COUNTS = (1, 2, 4, 8)
STEPS = 8  # of a timeline, and the fewest of a turn of `fit`
TURN_MS, MOST_STEPS = 1000, 30
EVERY = 3  # rounds with a plan and a timeline


def rows(name, rounds):
    """The rows of one model, in this process."""
    import time

    import tf_mp

    tf_mp.init(devices_per_rank=2)
    import keras

    from tf_mp import models, plan, request, timeline

    samples, settings = MODELS[name]
    builders = {**models.NAMES, "mlp": networks.mlp}
    cuts = "scopes" if name == "mnist_cnn" else "auto"
    for m in COUNTS:
        model = tf_mp.parallelize(
            lambda: builders[name](**settings), stages=2, micro_batches=m, cuts=cuts
        )
        pipeline = tf_mp.pipeline_of(model)
        cuts = [len(stage.operations) for stage in pipeline.stages]
        request.compile_if_needed(model)
        batch = request.random_batch(model, samples)
        data = networks.endless(batch)

        def step_ms(steps):
            start = time.perf_counter()
            model.fit(data, steps_per_epoch=steps, verbose=0)
            return (time.perf_counter() - start) * 1e3 / steps

        step_ms(3)
        # the beginning and the end of `fit` must not weigh
        steps = min(MOST_STEPS, max(STEPS, round(TURN_MS / step_ms(STEPS))))
        plans, times, seen, bounds = [], [], [], []
        for number in range(rounds):
            if number % EVERY == 0:
                plans.append(plan.plan(pipeline, samples))
            bounds.append(bound_ms(pipeline, model.optimizer, plans[0].micro_batch_sizes))
            step_ms(2)  # what was measured before left its marks on caches and memory
            turns = [step_ms(steps)]
            if number % EVERY == 0:
                seen.append(timeline.measure(model, batch, steps=STEPS))
                step_ms(2)
                turns.append(step_ms(steps))
            times.append(statistics.fmean(turns))
        stages = plans[0].stages
        slots = [v for v in model.optimizer.variables if v.shape.rank]
        yield {
            "model": name,
            "micro_batches": m,
            "measured_ms": times,
            "predicted_ms": [p.step_ms for p in plans],
            "bound_ms": bounds,
            "timeline_ms": [t.step_ms for t in seen],
            "profiled_ms": [t.profiled_ms for t in seen],
            "busy_ms": [{d: u * t.step_ms for d, u in t.utilisation().items()} for t in seen],
            "predicted_busy_ms": [list(p.simulation.busy_ms) for p in plans],
            "disorder": [step for t in seen for step in t.disorder()],
            "weights": [sum(s.bytes.weights for s in stages), size(model.variables)],
            "slots": [sum(s.bytes.slots for s in stages), size(slots)],
            "optimizer": keras.optimizers.serialize(model.optimizer)["class_name"],
        }


def bound_ms(pipeline, optimizer, sizes):
    """sum(t) + (m - 1) max(t) + max(u), each time measured alone on one core."""
    from tf_mp import affinity, cost, forecast, simulate

    sample = cost.sample_of(pipeline.graph, sizes[0])
    with affinity.limited_to(1):
        times = forecast.measure_stages(pipeline, sample, optimizer)
    stages = list(map(sum, zip(times.forward_ms, times.backward_ms, strict=True)))
    return simulate.pipeline_ms(stages, len(sizes), update_ms=times.update_ms)


def ratio(values, measured):
    """The median of the rounds' ratios and its 95 % interval, in words."""
    if len(values) < len(measured):
        measured = measured[::EVERY]
    middle, low, high = harness.ratio(values, measured)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def size(variables):
    """Bytes that variables take, from their values."""
    return sum(v.numpy().nbytes for v in variables)


def table(found):
    """All rows in Markdown."""
    lines = [
        "| model | m | predicted ms | measured ms (range) | predicted to measured (95 %) | "
        "bound to measured (95 %) | timeline to measured (95 %) | under the profiler (95 %) | "
        "order obeyed | weights and slots exact |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        measured = row["measured_ms"]
        keys = "predicted_ms", "bound_ms", "timeline_ms", "profiled_ms"
        ratios = [ratio(row[key], measured) for key in keys]
        obeyed = "no" if row["disorder"] else "yes"
        exact = len({*row["weights"]}) == len({*row["slots"]}) == 1
        cells = [
            row["model"], row["micro_batches"], f"{statistics.median(row['predicted_ms']):.1f}",
            f"{statistics.median(measured):.1f} ({min(measured):.1f} to {max(measured):.1f})",
            *ratios, obeyed, "yes" if exact else "NO",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main():
    """Measures every model in a process of its own."""
    options = harness.parser(__doc__.splitlines()[0], rounds=5, steps=STEPS)
    options.add_argument("--here", action="store_true", help="print rows as JSON")
    args = options.parse_args()
    if args.here:
        for row in rows(args.only, args.rounds):
            print("row:" + json.dumps(row), flush=True)
        return
    # operations are timed once; stages, which the prediction is made of, in every plan
    os.environ.setdefault("TF_MP_COST_CACHE", f"{tempfile.mkdtemp()}/costs.json")
    for name in [args.only] if args.only else MODELS:
        command = [sys.executable, __file__, "--here", "--only", name, "--rounds", args.rounds]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
        lines = [line.partition("row:")[2] for line in done.stdout.splitlines() if "row:" in line]
        found = list(map(json.loads, lines))
        text = f"{harness.head(args.rounds, args.steps)}\n\n{table(found)}"
        harness.write(FOLDER, name, text, found)


if __name__ == "__main__":
    main()
