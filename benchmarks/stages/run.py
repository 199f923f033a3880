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

#: Micro-batches of each network, of tf_mp and of the peer.
COUNTS = {"mnist_cnn": (1, 2, 4, 8), "mlp": (1, 2, 4), "transformer": (2, 4), "resnet50": (2, 4)}
#: The convolution that is most of the work on one device, what is before and after on the other.
THREE = ["--stages", 3, "--cuts", "conv2,flatten", "--devices", "1,0,1"]


def variants(name):
    """All variants of one network; the larger ones in fewer."""
    keras = [sys.executable, FOLDER.parent / "keras_turn.py"]
    one, two = ["--cores", 1, "--threads", 1], ["--threads", 2]
    made = [
        harness.Variant("plain Keras, 2 cores", [*keras, "plain", name, *two]),
        harness.Variant("plain Keras, 1 core", [*keras, "plain", name, *one]),
        harness.Variant(
            "tf_mp, 1 stage, m = 1, 1 core", [*keras, "split", name, "--stages", 1, *one]
        ),
    ]
    small = name == "mnist_cnn"
    if small:
        idiom = [*keras, "idiom", name, *two]
        made.append(harness.Variant("the usual idiom, 2 devices", idiom))
    for m in COUNTS[name]:
        words = ["split", name, "--micro-batches", m, "--threads", 1]
        made.append(harness.Variant(f"tf_mp, 2 stages, m = {m}", [*keras, *words]))
        if small and m > 1:
            other = [*keras, *words, "--schedule", "gpipe"]
            made.append(harness.Variant(f"tf_mp, 2 stages, m = {m}, gpipe", other))
            text = f"tf_mp, 3 stages on 2 devices, m = {m}"
            made.append(harness.Variant(text, [*keras, *words, *THREE]))
    return made + peers(name)


def peers(name):
    """The same network in PyTorch; its pipeline at each m that divides the batch."""
    python = os.environ.get("PEER_PYTHON")
    if not python:
        return []
    torch = [python, FOLDER.parent / "torch_turn.py"]
    made = [
        harness.Variant("PyTorch, 2 threads", [*torch, "plain", name, "--threads", 2]),
        harness.Variant("PyTorch, 1 thread", [*torch, "plain", name, "--cores", 1]),
    ]
    for m in COUNTS[name]:
        if m == 1 or networks.network(name).batch % m:
            continue  # 1F1B wants as many micro-batches as stages, and all of one size
        for schedule in ("1f1b", "gpipe"):
            words = ["pipeline", name, "--micro-batches", m, "--schedule", schedule]
            text = f"PyTorch pipeline, m = {m}, {schedule}"
            made.append(harness.Variant(text, [*torch, *words]))
    return made


def main():
    """Measures every network."""
    args = harness.parser(__doc__.splitlines()[0], steps=3).parse_args()
    for name in [args.only] if args.only else networks.NAMES:
        found = harness.measure(variants(name), args.rounds, args.steps)
        batch = networks.network(name).batch
        text = f"{name}, batch {batch}. {harness.head(args.rounds, args.steps)}\n\n"
        harness.write(FOLDER, name, text + harness.table(found, batch), found)


if __name__ == "__main__":
    main()
