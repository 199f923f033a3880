"""A split model in mixed precision at two ranks is the plain model, also when a step overflows."""

import keras
import numpy as np
import pytest
import reference

import tf_mp
import tf_mp.hvd as hvd
from tf_mp import training

WORLD = tf_mp.current_world()
OVERFLOWING = 2


def network():
    x = inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="a")(x)
    x = keras.layers.Dense(8, activation="tanh", name="b")(x)
    return keras.Model(inputs, keras.layers.Dense(1, dtype="float32", name="c")(x))


def batches(overflow):
    """Five local batches; in the third, one label of rank 1 is too large for float16."""
    random = np.random.default_rng(WORLD.rank)
    made = [(random.random((8, 6), np.float32), random.random((8, 1))) for _ in range(5)]
    if overflow and WORLD.rank == 1:
        made[OVERFLOWING][1][-1] = 1e30
    return made


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def test_mixed_precision_steps_and_skips_as_the_plain_model(policy):
    half = policy == "mixed_float16"
    plain = network()
    split = tf_mp.parallelize(
        keras.models.clone_model(plain), cuts=["b"], micro_batches=2, schedule="1f1b"
    )
    reference.copy_weights(plain, split)
    for model in (plain, split):
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
        model.optimizer.build(model.trainable_variables)
    start = [v.numpy() for v in split.trainable_variables]
    skipped = []
    for number, (x, y) in enumerate(batches(overflow=half)):
        before = split.trainable_variables[0].numpy()
        for model in (plain, split):
            model.train_on_batch(x, y)
        if np.array_equal(before, split.trainable_variables[0].numpy()):
            skipped.append(number)
    assert skipped == ([OVERFLOWING] if half else [])
    for name, a, b, first in zip(
        [v.path for v in plain.trainable_variables], plain.trainable_variables,
        split.trainable_variables, start, strict=True,
    ):  # fmt: skip
        assert np.isfinite(b.numpy()).all()
        assert not np.array_equal(first, b.numpy()), name
        np.testing.assert_allclose(a.numpy(), b.numpy(), atol=5e-3 if half else 3e-2, err_msg=name)
    if half:
        assert int(split.optimizer.iterations) == int(plain.optimizer.iterations) == 4
        assert float(split.optimizer.dynamic_scale) == float(plain.optimizer.dynamic_scale)
        assert float(split.optimizer.dynamic_scale) == 2.0**14
    training.digest_of_weights(split)  # differing ranks are an error
