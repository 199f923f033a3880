"""From the command to the end of the first step, and how much graph a step is.

Each variant is a new process. Its parts: Python and imports, building and splitting the model, the
first step (tracing and TensorFlow's own work on the graph included), a later step.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402

VARIANTS = {"plain Keras": 0, "2 stages, m = 2": 2, "2 stages, m = 8": 8}


def one(name, micro_batches, began):
    """The parts in seconds, and the nodes of the traced and of the executed graph."""
    import tf_mp

    tf_mp.init(devices_per_rank=2)
    import keras
    import networks

    from tf_mp import probe

    imported = time.time()
    network = networks.network(name, 16 if name == "resnet50" else None)
    if micro_batches:
        cuts = [88, 88] if name == "resnet50" else network.cuts  # without measuring
        model = tf_mp.parallelize(network.build, micro_batches=micro_batches, cuts=cuts)
    else:
        model = network.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(0.001), loss)
    built = time.time()
    data = networks.endless((network.x, network.y))
    model.fit(data, steps_per_epoch=1, verbose=0)
    first = time.time()
    model.fit(data, steps_per_epoch=5, verbose=0)
    later = (time.time() - first) / 5
    run = probe.run_step(model, (network.x, network.y), step="train")
    return {
        "import": imported - began,
        "build": built - imported,
        "first step": first - built,
        "all": first - began,
        "later step": later,
        "traced": traced_nodes(model, network) if micro_batches else None,
        "executed": len(run.ops),
    }


def traced_nodes(model, network):
    """Nodes of the step's graph and of the functions in its library."""
    import tensorflow as tf

    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    graph = step.get_concrete_function(
        tf.constant(network.x), tf.constant(network.y)
    ).graph.as_graph_def()
    return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)


def main():
    """Runs the variants in turns."""
    options = harness.parser(__doc__.splitlines()[0], rounds=5)
    options.add_argument("--here", help="micro-batches,start")
    args = options.parse_args()
    if args.here:
        count, began = args.here.split(",")
        print("row:" + json.dumps(one(args.only, int(count), float(began))))
        return
    for name in [args.only] if args.only else ("mnist_cnn", "resnet50"):
        found = {variant: [] for variant in VARIANTS}
        for _ in range(args.rounds):
            for variant, count in VARIANTS.items():
                words = ["--only", name, "--here", f"{count},{time.time()}"]
                done = subprocess.run(
                    [sys.executable, __file__, *words], capture_output=True, text=True
                )
                if done.returncode:
                    sys.exit(f"{variant} failed:\n{done.stderr[-3000:]}")
                found[variant].append(json.loads(done.stdout.rpartition("row:")[2]))
        text = f"{name}, seconds. {harness.head(args.rounds, 1)}\n\n{table(found)}"
        harness.write(FOLDER, name, text, found)


def table(found):
    """Medians in Markdown."""
    parts = ("import", "build", "first step", "all", "later step")
    lines = [
        f"| variant | {' | '.join(parts)} | nodes traced | nodes executed |",
        "| --- |" + " --- |" * (len(parts) + 2),
    ]
    for variant, rows in found.items():
        cells = [f"{statistics.median(row[part] for row in rows):.2f}" for part in parts]
        cells += [str(rows[0]["traced"] or "-"), str(rows[0]["executed"])]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
