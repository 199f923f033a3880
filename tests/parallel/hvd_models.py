"""A tiny network, its data, and what "in step" means, for the tests of tf_mp.hvd."""

import keras
import numpy as np
import tensorflow as tf

from tf_mp import hvd

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


def network(dtype=None, seed=0):
    """Two dense layers, from 3 numbers to 2."""
    keras.utils.set_random_seed(seed)
    keras.utils.clear_session()
    keras.config.set_dtype_policy(dtype or "float32")
    layers = [keras.layers.Dense(4, "tanh", name="hidden"), keras.layers.Dense(2, name="out")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    keras.config.set_dtype_policy("float32")
    return model


def train(optimizer, data, dtype=None, traced=False):
    """A network after one step on each batch; eager steps need no tracing."""
    model = network(dtype)
    # Keras traces what ScheduleFreeAdamW does while it is built, and repeats it each step.
    optimizer.build(model.trainable_variables)
    model.optimizer = optimizer

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.cast(model(x, training=True), tf.float32) - y))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(step) if traced else step
    for x, y in data:
        step(x, y)
    return model


def train_split(optimizer, data, dtype=None, traced=True):
    """The same with this rank's share of each batch, in a traced step."""
    return train(optimizer, [(mine(x), mine(y)) for x, y in data], dtype, traced)


def train_by_keras(optimizer, data, dtype=None, **compile_options):
    """The same by Keras's own `train_step`."""
    model = network(dtype)
    model.compile(optimizer, loss="mse", **compile_options)
    for x, y in data:
        model.train_on_batch(mine(x), mine(y))
    return model


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
