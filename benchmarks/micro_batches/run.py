"""What smaller micro-batches cost: one stage on one core, the batch in 1, 2, 4 and 8 parts."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402
import networks  # noqa: E402

COUNTS = (1, 2, 4, 8)


def variants(name):
    """Plain Keras on one core, and one stage with each number of micro-batches."""
    keras = [sys.executable, FOLDER.parent / "keras_turn.py"]
    one = ["--cores", 1, "--threads", 1]
    made = [harness.Variant("plain Keras", [*keras, "plain", name, *one])]
    for m in COUNTS:
        words = [*keras, "split", name, "--stages", 1, "--micro-batches", m, *one]
        made.append(harness.Variant(f"1 stage, m = {m}", words))
    return made


def main():
    """Measures the networks."""
    args = harness.parser(__doc__.splitlines()[0], steps=4).parse_args()
    for name in [args.only] if args.only else ("mnist_cnn", "mlp", "transformer"):
        found = harness.measure(variants(name), args.rounds, args.steps)
        batch = networks.network(name).batch
        text = f"{name}, batch {batch}, 1 core. {harness.head(args.rounds, args.steps)}\n\n"
        harness.write(FOLDER, name, text + harness.table(found, batch), found)


if __name__ == "__main__":
    main()
