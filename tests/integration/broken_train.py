"""`scripts/train.py` with one promise broken, named on the command line before its arguments."""

import os
import runpy
import sys
from pathlib import Path

BROKEN = sys.argv.pop(1)
if BROKEN == "horovod":  # not installed
    sys.modules["horovod"] = None

import tf_mp  # noqa: E402

# isort: split
import keras  # noqa: E402

from tf_mp import training, world  # noqa: E402

replicate = training.replicate


def keeping_its_own_gradients(optimizer):
    """An optimizer that takes part in the reductions, and whose rank 1 ignores their result."""
    wrapped = replicate(optimizer)
    reduce = wrapped.reduce_gradients

    def ignore(gradients, variables):
        reduced = reduce(gradients, variables)
        if world.current().is_root:
            return reduced
        # What nothing reads would be pruned, and rank 0 would wait for it.
        return [own + 0 * mean for own, mean in zip(gradients, reduced)]

    object.__setattr__(wrapped, "reduce_gradients", ignore)
    return wrapped


if BROKEN == "averaging":
    training.replicate = keeping_its_own_gradients
if BROKEN == "broadcast":
    training.broadcast = keras.callbacks.Callback
    number = int(os.environ["OMPI_COMM_WORLD_RANK"])
    set_seed = keras.utils.set_random_seed
    keras.utils.set_random_seed = lambda seed: set_seed(seed + number)

assert BROKEN in ("horovod", "averaging", "broadcast"), BROKEN
assert tf_mp
runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train.py"), run_name="__main__")
