"""The transparency check sees each kind of fault: here they are made on purpose."""

import keras
import numpy as np
import pytest
import reference

import tf_mp
from tf_mp import engine, loss, randomness, train_step

X = np.random.default_rng(0).normal(size=(9, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 9)
WEIGHT = np.random.default_rng(2).random(9).astype("float32") * 3


def build():
    image = keras.Input((6,), name="image")
    x = keras.layers.Dense(8, activation="tanh", name="a")(image)
    x = keras.layers.Dropout(0.5, seed=4, name="b")(x)
    x = keras.layers.Dense(8, activation="tanh", name="c")(x)
    return keras.Model(image, keras.layers.Dense(3, name="d")(x), name="small")


def check(change=lambda model: None):
    kind = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    plain = build()
    split = tf_mp.parallelize(keras.models.clone_model(plain), cuts=["c"], micro_batches=3)
    reference.copy_weights(plain, split)
    split.compile(reference.Keep(), kind)
    change(split)
    split.train_on_batch(X, Y, sample_weight=WEIGHT)
    expected, _, _ = reference.step(plain, [kind], X, Y, 3, sample_weight=WEIGHT)
    found = reference.gradients_of(split)
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-4, atol=1e-6, err_msg=path)


def test_without_a_fault_the_check_is_green():
    check()


def test_a_dropped_layer():
    def drop(model):
        operation = tf_mp.pipeline_of(model).stages[1].operations[0]
        (before,), (after,) = operation.inputs, operation.outputs
        operation.run = lambda values, training: values.update({after: values[before]})

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(drop)


def test_a_swapped_boundary(monkeypatch):
    real = engine.Engine.arguments

    def swapped(self, stage, i):
        made = list(real(self, stage, i))
        if stage.index == 0:
            made[3] = real(self, stage, (i + 1) % 3)[3]
        return tuple(made)

    monkeypatch.setattr(engine.Engine, "arguments", swapped)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check()


def test_a_doubled_loss_scale(monkeypatch):
    real = train_step._Train._weight
    monkeypatch.setattr(train_step._Train, "_weight", lambda *args: 2 * real(*args))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check()


def test_a_reused_dropout_mask(monkeypatch):
    real, right_step = randomness.keys, reference.step

    def reused(seeds, ordinals, step, number):
        return real(seeds, ordinals, step, number * 0)

    def step(*args, **kwargs):
        with monkeypatch.context() as context:  # the reference draws as it should
            context.setattr(randomness, "keys", real)
            return right_step(*args, **kwargs)

    monkeypatch.setattr(randomness, "keys", reused)
    monkeypatch.setattr(reference, "step", step)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check()


def test_a_plain_mean_under_sample_weights(monkeypatch):
    monkeypatch.setattr(
        loss, "denominators", lambda entry, sizes, mask, cut: [float(n) for n in sizes]
    )
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check()
