"""Two ranks: `tf_mp.hvd` under `fit` beside Horovod's hand-written loop and the peers.

PEER_PYTHON names a Python that has PyTorch; without it the peer's rows are left out.
"""

import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402
import networks  # noqa: E402


def variants(name):
    """All variants of one network; a rank has one thread, the machine two cores."""
    keras = [sys.executable, FOLDER.parent / "keras_turn.py"]
    peer = os.environ.get("PEER_PYTHON")
    torch = [peer, FOLDER.parent / "torch_turn.py"]
    one = ["--stages", 1, "--threads", 1]
    loop = harness.mpirun(2, [*keras, "horovod_loop", name, *one])
    fit = [*keras, "horovod_fit", name, *one]
    spinning = {"mpi_yield_when_idle": 0}
    made = [
        harness.Variant("2 ranks, hand-written loop", loop),
        harness.Variant("2 ranks, tf_mp.hvd under fit", harness.mpirun(2, fit)),
        harness.Variant("1 rank, 1 core", [*keras, "plain", name, "--cores", 1, "--threads", 1]),
    ]
    if name == "mnist_cnn":  # the rest takes too long with a large network
        mirrored = [*keras, "mirrored", name, "--threads"]
        made += [
            harness.Variant(
                "2 ranks, tf_mp.hvd under fit, MPI spinning", harness.mpirun(2, fit, **spinning)
            ),
            harness.Variant("MirroredStrategy", [*mirrored, 1]),
            harness.Variant("MirroredStrategy, 2 threads", [*mirrored, 2]),
        ]
    if peer:
        made.append(harness.Variant("2 processes, PyTorch DDP", [*torch, "ddp", name]))
    return made


def main():
    """Measures the networks."""
    args = harness.parser(__doc__.splitlines()[0], rounds=21, steps=5).parse_args()
    for name in [args.only] if args.only else ("mnist_cnn", "resnet50"):
        found = harness.measure(variants(name), args.rounds, args.steps)
        batch = networks.network(name).batch
        text = (
            f"{name}, batch {batch} a rank (samples a second: of one rank). "
            f"{harness.head(args.rounds, args.steps)}\n\n"
        )
        harness.write(FOLDER, name, text + harness.table(found, batch), found)


if __name__ == "__main__":
    main()
