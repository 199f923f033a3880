"""Two ranks of two stages each on one machine: transports, threads, bytes, overlap."""

import json
import pathlib
import statistics
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402

NETWORK, BATCH, MICRO_BATCHES, STEPS = "mnist_cnn", 100, 2, 20
TURN = [sys.executable, FOLDER.parent / "keras_turn.py"]
SPLIT = [NETWORK, "--micro-batches", MICRO_BATCHES]
GLOO = ["horovodrun", "--gloo", "--network-interfaces", "lo", "-np", "2"]


def variants():
    """One rank and two, one stage and two, by transport and threads."""
    one = [*TURN, "horovod_fit", NETWORK, "--stages", 1, "--threads"]
    two = [*TURN, "horovod_fit", *SPLIT, "--threads"]
    alone = [*TURN, "split", *SPLIT, "--threads", 1]
    spinning = harness.mpirun(2, [*two, 1], mpi_yield_when_idle=0)
    return [
        harness.Variant("1 rank x 2 stages", alone),
        harness.Variant("2 ranks x 1 stage", harness.mpirun(2, [*one, 1])),
        harness.Variant("2 ranks x 1 stage, threads not capped", harness.mpirun(2, [*one, 2])),
        harness.Variant("2 ranks x 2 stages", harness.mpirun(2, [*two, 1])),
        harness.Variant("2 ranks x 2 stages, threads not capped", harness.mpirun(2, [*two, 2])),
        harness.Variant("2 ranks x 2 stages, MPI spinning", spinning),
        harness.Variant("2 ranks x 2 stages, Gloo", [*GLOO, *two, 1]),
    ]


def bytes_a_step():
    """Megabytes that cross the loopback in a step of two ranks under Gloo, both ways together."""
    ranks = harness.Variant("Gloo", [*GLOO, *TURN, "horovod_fit", *SPLIT, "--threads", 1])
    ranks.start()
    ranks.turn(STEPS)
    before = loopback()
    ranks.turn(STEPS)
    sent = loopback() - before
    ranks.end()
    return sent / STEPS / 1e6


def loopback():
    """Bytes that this machine has sent to itself."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise ValueError("no loopback")


def timed():
    """What a timeline says on each of two ranks: see `one`."""
    command = harness.mpirun(2, [sys.executable, __file__, "--here"])
    words = list(map(str, command))
    del words[words.index("-x") : words.index("-x") + 2]  # TURNS: there are none
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    lines = [line.partition("row:")[2] for line in done.stdout.splitlines() if "row:" in line]
    return list(map(json.loads, lines))


def one():
    """The share of the reductions during which a stage worked, and the gradients' bytes."""
    import os

    os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
    import tf_mp

    tf_mp.init(devices_per_rank=2)
    import keras
    import networks

    from tf_mp import hvd, timeline

    network = networks.network(NETWORK)
    model = tf_mp.parallelize(network.build, micro_batches=MICRO_BATCHES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.001)), loss)
    data = networks.endless((network.x, network.y))
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(data, steps_per_epoch=3, verbose=0, callbacks=start)
    seen = timeline.measure(model, (network.x, network.y), steps=15)
    return {
        "overlapped": [step.overlapped for step in seen.steps],
        "gradients_mb": sum(v.numpy().nbytes for v in model.trainable_variables) / 1e6,
    }


def main():
    """Measures, counts, writes."""
    options = harness.parser(__doc__.splitlines()[0], steps=STEPS)
    options.add_argument("--here", action="store_true", help="the timeline of one rank, as JSON")
    args = options.parse_args()
    if args.here:
        print("row:" + json.dumps(one()), flush=True)
        return
    found = harness.measure(variants(), args.rounds, args.steps)
    ranks, sent = timed(), bytes_a_step()
    shares = [statistics.median(row["overlapped"]) for row in ranks]
    text = (
        f"{NETWORK}, batch {BATCH} a rank (samples a second: of one rank), m = {MICRO_BATCHES}. "
        f"{harness.head(args.rounds, args.steps)}\n\n{harness.table(found, BATCH)}\n\n"
        f"Bytes of the gradients: {ranks[0]['gradients_mb']:.1f} MB. Sent in a step under Gloo, "
        f"by both ranks together: {sent:.1f} MB. Share of the reductions while a stage worked "
        f"(median of 15 steps, each rank): {', '.join(f'{share:.2f}' for share in shares)}."
    )
    harness.write(FOLDER, NETWORK, text, {**found, "ranks": ranks, "sent_mb": sent})


if __name__ == "__main__":
    main()
