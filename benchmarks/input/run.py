"""Images a second of the data pipeline alone, beside those of the training that it feeds.

DATA_DIR names the folder of a prepared set, DATASET the set (fashion_mnist by default).
"""

import os
import pathlib
import statistics
import sys
import time

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import harness  # noqa: E402

BATCH = 100


def main():
    """Measures the pipeline and the training in turns, on the same cores."""
    args = harness.parser(__doc__.splitlines()[0], rounds=7, steps=100).parse_args()
    import tf_mp

    tf_mp.init(devices_per_rank=2)
    import keras
    import networks

    from tf_mp import data

    settings = {
        "batch_size": BATCH, "world": tf_mp.current_world(), "seed": 0,
        "data_dir": os.environ.get("DATA_DIR"),
    }  # fmt: skip
    images = data.load(
        os.environ.get("DATASET", "fashion_mnist"), "train",
        steps=args.steps * (args.rounds + 1), **settings,
    )  # fmt: skip
    model = tf_mp.parallelize(tf_mp.build_model, micro_batches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.RMSprop(0.001), loss)
    one = networks.endless(next(iter(images)))
    model.fit(one, steps_per_epoch=5, verbose=0)
    found = {"the pipeline alone": [], "training, two stages": []}
    batches = iter(images)
    for number in range(args.rounds + 1):
        start = time.perf_counter()
        for _ in range(args.steps):
            next(batches)
        middle = time.perf_counter()
        model.fit(one, steps_per_epoch=args.steps // 5, verbose=0)
        end = time.perf_counter()
        if number:
            found["the pipeline alone"].append((middle - start) / args.steps * 1e3)
            found["training, two stages"].append((end - middle) / (args.steps // 5) * 1e3)
    medians = [statistics.median(values) for values in found.values()]
    text = (
        f"batch {BATCH}. {harness.head(args.rounds, args.steps)}\n\n"
        f"{harness.table(found, BATCH, 'training, two stages')}\n\n"
        f"The pipeline delivers {medians[1] / medians[0]:.0f} times what the training takes."
    )
    harness.write(FOLDER, "mnist_cnn", text, found)


if __name__ == "__main__":
    main()
