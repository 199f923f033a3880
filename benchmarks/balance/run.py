"""VGG-16 in two stages: the automatic cut beside the cut that halves the parameters."""

import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402
import networks  # noqa: E402


def main():
    """Measures both cuts, and plain Keras."""
    args = harness.parser(__doc__.splitlines()[0], rounds=15, steps=2).parse_args()
    split = [sys.executable, FOLDER.parent / "keras_turn.py", "split", "vgg16", "--threads", 1]
    split += ["--micro-batches", 4, "--cuts"]
    plain = [*split[:2], "plain", "vgg16", "--threads", 2]
    variants = [
        harness.Variant("2 stages, by parameters", [*split, "parameters"]),
        harness.Variant("2 stages, auto", [*split, "auto"]),
        harness.Variant("plain Keras, 2 cores", plain),
    ]
    found = harness.measure(variants, args.rounds, args.steps)
    batch = networks.network("vgg16").batch
    text = f"VGG-16, 64 x 64, batch {batch}, m = 4. {harness.head(args.rounds, args.steps)}\n\n"
    harness.write(FOLDER, "vgg16", text + harness.table(found, batch), found)


if __name__ == "__main__":
    main()
