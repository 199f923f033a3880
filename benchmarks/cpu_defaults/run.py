"""What tf_mp's settings for CPUs gain over TensorFlow's own: oneDNN and threads."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402
import networks  # noqa: E402


def variants(name):
    """Plain Keras on both cores, with and without what tf_mp sets, and two stages."""
    keras = [sys.executable, FOLDER.parent / "keras_turn.py"]
    usual = [*keras, "plain", name]
    plain = [*keras, "plain", name, "--threads", 2]
    split = [*keras, "split", name, "--micro-batches", 2]
    without = {"TF_ENABLE_ONEDNN_OPTS": "0"}
    return [
        harness.Variant("plain Keras, TensorFlow's defaults", [*usual, "--default-threads"]),
        harness.Variant("plain Keras, oneDNN on", [*plain]),
        harness.Variant("plain Keras, oneDNN off", [*plain], without),
        harness.Variant("2 stages, m = 2, one thread a device", [*split]),
        harness.Variant("2 stages, m = 2, two threads a device", [*split, "--threads", 2]),
        harness.Variant("2 stages, m = 2, oneDNN off", [*split], without),
    ]


def main():
    """Measures the networks."""
    args = harness.parser(__doc__.splitlines()[0], steps=3).parse_args()
    for name in [args.only] if args.only else ("mnist_cnn", "mlp"):
        found = harness.measure(variants(name), args.rounds, args.steps)
        batch = networks.network(name).batch
        text = f"{name}, batch {batch}. {harness.head(args.rounds, args.steps)}\n\n"
        harness.write(FOLDER, name, text + harness.table(found, batch), found)


if __name__ == "__main__":
    main()
