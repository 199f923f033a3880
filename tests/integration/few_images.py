"""A prepared data set of 1,000 real images to train on and 201 to test with."""

import os

import numpy as np

from tf_mp import data, idx
from tf_mp.choose import choose
from tf_mp.world import World


def prepare(folder):
    """Writes the set into a folder and returns the options of `train.py` that name it."""
    found = choose(os.environ.get("DATA_DIR"))
    splits = {}
    for split, count in [("train", 1000), ("test", 201)]:
        some = data.load(
            found.dataset, f"{split}[:{count}]", batch_size=count, world=World(), seed=0,
            data_dir=found.data_dir, shuffle=False,
        )
        pixels, labels = next(iter(some))
        pixels = np.rint(pixels.numpy()[..., 0] * 255).astype(np.uint8)
        splits[split] = (pixels, labels.numpy().astype(np.uint8))
    (folder / "idx").mkdir()
    idx.write_folder(folder / "idx", splits)
    data.prepare("few_images", folder, folder / "idx")
    return ["--dataset", "few_images", "--data-dir", str(folder)]
