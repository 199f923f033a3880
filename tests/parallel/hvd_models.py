"""A tiny network, its data, and what "in step" means, for the tests of tf_mp.hvd."""

import keras
import numpy as np

import tf_mp.hvd as hvd

BATCH = 8  # samples of one step, over all ranks


def batches(steps=5, seed=3, features=3):
    """The samples of each step: x (BATCH, features) and y (BATCH, 2), the same on every rank."""
    rng = np.random.default_rng(seed)
    shapes = (steps, BATCH, features), (steps, BATCH, 2)
    return list(zip(*(rng.normal(size=shape).astype("float32") for shape in shapes), strict=True))


def mine(array):
    """This rank's share of an array's first dimension."""
    share = len(array) // hvd.size()
    return array[hvd.rank() * share : (hvd.rank() + 1) * share]


def network(dtype=None, seed=0, **options):
    keras.utils.set_random_seed(seed)
    keras.utils.clear_session()
    layers = [
        keras.layers.Dense(4, activation="tanh", dtype=dtype, name="hidden", **options),
        keras.layers.Dense(2, dtype=dtype, name="out"),
    ]
    return keras.Sequential([keras.Input((3,)), *layers])


def train(optimizer, data, dtype=None, **compile_options):
    """A network after one step on each batch, by Keras alone; eager steps need no tracing."""
    model = network(dtype)
    model.compile(optimizer, loss="mse", **{"run_eagerly": True, **compile_options})
    # Keras traces what ScheduleFreeAdamW does while it is built, and repeats it each step.
    model.optimizer.build(model.trainable_variables)
    for x, y in data:
        model.train_on_batch(x, y)
    return model


def train_split(optimizer, data, dtype=None, **compile_options):
    """The same with this rank's share of each batch."""
    options = {"run_eagerly": False, **compile_options}
    return train(optimizer, [(mine(x), mine(y)) for x, y in data], dtype, **options)


def flat(variables):
    return np.concatenate([np.ravel(v.numpy()).astype("float64") for v in variables])


def of_all_ranks(vector):
    """One row for each rank."""
    return hvd.allgather(np.asarray(vector)[None]).numpy()


def assert_in_step(variables):
    rows = of_all_ranks(flat(variables))
    assert np.array_equal(rows[0], rows[-1]), np.abs(rows[0] - rows[-1]).max()


def assert_close(found, wanted, tolerance=1e-5):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            one.numpy(), other.numpy(), rtol=tolerance, atol=tolerance, err_msg=one.path
        )
