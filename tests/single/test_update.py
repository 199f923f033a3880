"""The optimizer steps stage by stage as Keras steps on the whole model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_mp

OPTIMIZERS = [
    "SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam",
    "Ftrl", "Lion", "Lamb",
]  # fmt: skip
SETTINGS = [
    {"clipnorm": 0.1},
    {"global_clipnorm": 0.1},
    {"clipvalue": 0.01},
    {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 2},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1, "use_ema": True},
    {"weight_decay": 0.1},
    {"loss_scale_factor": 8.0},
]
STEPS = 5


def build():
    image = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", kernel_constraint="max_norm", name="a")(image)
    return keras.Model(image, keras.layers.Dense(3, name="b")(x))


def data(steps=STEPS):
    random = np.random.default_rng(1)
    x = random.normal(size=(steps, 12, 6)).astype("float32")
    return x, random.integers(0, 3, (steps, 12))


def trained(optimizer, split, steps=STEPS, wrap=lambda o: o, poison=None, **compiled):
    keras.utils.set_random_seed(2)
    model = build()
    if split:
        model = tf_mp.parallelize(model, cuts=["b"], micro_batches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(optimizer()), loss, jit_compile=False, **compiled)
    for number, (x, y) in enumerate(zip(*data(steps))):
        x = x * np.inf if number == poison else x
        model.train_on_batch(x, y)
    return model


def assert_equal_models(found, expected):
    assert len(found.variables) == len(expected.variables)
    for a, b in zip(found.variables, expected.variables):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=b.path)
    ours, theirs = found.optimizer.variables, expected.optimizer.variables
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=b.path)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_as_on_the_whole_model(name):
    make = lambda: getattr(keras.optimizers, name)(0.01)  # noqa: E731
    assert_equal_models(trained(make, True), trained(make, False))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(s))
def test_settings_of_an_optimizer_hold_over_all_stages(setting):
    make = lambda: keras.optimizers.SGD(0.01, momentum=0.9, **setting)  # noqa: E731
    assert_equal_models(trained(make, True), trained(make, False))


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / 2.0 ** tf.cast(step, tf.float32)

    def get_config(self):
        return {}


@pytest.mark.parametrize(
    "rate", [keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), Halving()]
)
def test_learning_rate_schedules_follow_the_step(rate):
    make = lambda: keras.optimizers.SGD(rate)  # noqa: E731
    assert_equal_models(trained(make, True), trained(make, False))


@pytest.mark.parametrize("poison", [None, 1])
def test_a_loss_scale_optimizer_skips_the_step_with_an_infinity(poison):
    scaled = lambda o: keras.optimizers.LossScaleOptimizer(  # noqa: E731
        o, initial_scale=64.0, dynamic_growth_steps=2
    )
    make = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    split, plain = (trained(make, s, wrap=scaled, poison=poison) for s in (True, False))
    assert_equal_models(split, plain)
    done = STEPS - (poison is not None)
    assert int(split.optimizer.inner_optimizer.iterations.numpy()) == done


def test_an_optimizer_that_holds_others_is_refused_by_name():
    model = tf_mp.parallelize(build(), cuts=["b"], micro_batches=2)
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    )
    with pytest.raises(ValueError, match="MultiOptimizer cannot step stage by stage"):
        model.compile(several, "mse")
