"""Two stages on two cores, beside plain Keras, the usual idiom and PyTorch's pipeline.

PEER_PYTHON names a Python that has PyTorch; without it the peer's rows are left out.
"""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402
import networks  # noqa: E402

COUNTS = (1, 2, 4, 8)


def variants(name, quick=False):
    """All variants of one network."""
    keras = [sys.executable, FOLDER.parent / "keras_turn.py"]
    peer = os.environ.get("PEER_PYTHON")
    torch = [peer, FOLDER.parent / "torch_turn.py"]
    one, two = ["--cores", 1, "--threads", 1], ["--threads", 2]
    made = [
        harness.Variant("plain Keras, 2 cores", [*keras, "plain", name, *two]),
        harness.Variant("plain Keras, 1 core", [*keras, "plain", name, *one]),
        harness.Variant(
            "tf_mp, 1 stage, m = 1, 1 core", [*keras, "split", name, "--stages", 1, *one]
        ),
    ]
    if name == "mnist_cnn":
        idiom = [*keras, "idiom", name, *two]
        made.append(harness.Variant("the usual idiom, 2 devices", idiom))
    for schedule in ("1f1b", "gpipe"):
        for m in COUNTS:
            if m == 1 and schedule == "gpipe" or quick and schedule == "gpipe":
                continue
            words = ["split", name, "--micro-batches", m, "--schedule", schedule, "--threads", 1]
            made.append(harness.Variant(f"tf_mp, 2 stages, m = {m}, {schedule}", [*keras, *words]))
    if peer:
        made.append(harness.Variant("PyTorch, 2 threads", [*torch, "plain", name, "--threads", 2]))
        made.append(harness.Variant("PyTorch, 1 thread", [*torch, "plain", name, "--cores", 1]))
        for schedule in ("1f1b", "gpipe"):
            for m in COUNTS:
                if schedule == "1f1b" and m == 1 or networks.network(name).batch % m:
                    # PyTorch wants as many micro-batches as stages, and of one size
                    continue
                words = ["pipeline", name, "--micro-batches", m, "--schedule", schedule]
                text = f"PyTorch pipeline, m = {m}, {schedule}"
                made.append(harness.Variant(text, [*torch, *words]))
    return made


def main():
    """Measures every network."""
    options = harness.parser(__doc__.splitlines()[0], steps=3)
    options.add_argument("--quick", action="store_true", help="without gpipe of tf_mp")
    args = options.parse_args()
    for name in [args.only] if args.only else networks.NAMES:
        found = harness.measure(variants(name, args.quick), args.rounds, args.steps)
        batch = networks.network(name).batch
        text = f"{name}, batch {batch}. {harness.head(args.rounds, args.steps)}\n\n"
        harness.write(FOLDER, name, text + harness.table(found, batch), found)


if __name__ == "__main__":
    main()
