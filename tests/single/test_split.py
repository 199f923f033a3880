"""A split model is the Keras model that it was: everything goes on working."""

import os

import keras
import numpy as np
import pytest
import reference
import tensorflow as tf

import tf_mp

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
X = np.random.default_rng(0).normal(size=(37, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 37)


def build():
    image = keras.Input((6,), name="image")
    x = keras.layers.Dense(8, activation="tanh", name="a")(image)
    x = keras.layers.Dense(8, activation="tanh", name="b")(x)
    return keras.Model(image, keras.layers.Dense(3, name="c")(x), name="small")


def pair(
    optimizer="adam", metrics=("accuracy",), loss=LOSS, maker=build, cuts=("b", "c"), **kwargs
):
    """The same model plain and split, compiled alike."""
    plain = maker()
    split = tf_mp.parallelize(keras.models.clone_model(plain), cuts=list(cuts), micro_batches=4)
    reference.copy_weights(plain, split)
    for model in (plain, split):
        own = optimizer() if callable(optimizer) else optimizer
        model.compile(own, loss, metrics=list(metrics), **kwargs)
    return plain, split


def assert_same(plain, split):
    for a, b in zip(plain.variables, split.variables, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=a.path)


def test_fit_evaluate_and_predict_equal_the_plain_model():
    plain, split = pair()
    histories = [
        m.fit(X, Y, batch_size=10, epochs=2, shuffle=False, validation_data=(X, Y), verbose=0,
              class_weight={0: 1.0, 1: 2.0, 2: 0.5}).history
        for m in (plain, split)
    ]  # fmt: skip
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-4, err_msg=name)
    assert_same(plain, split)
    for count in (1, 3, 37):  # fewer samples than micro-batches, and a number that none divides
        np.testing.assert_allclose(
            split.predict(X[:count], verbose=0), plain.predict(X[:count], verbose=0), rtol=1e-5,
            atol=1e-6,
        )  # fmt: skip
        np.testing.assert_allclose(
            split.evaluate(X[:count], Y[:count], verbose=0),
            plain.evaluate(X[:count], Y[:count], verbose=0), rtol=1e-5,
        )  # fmt: skip


def test_run_eagerly_and_steps_per_execution_give_the_same_weights():
    plain, split = pair(steps_per_execution=3)
    for model in (plain, split):
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    assert_same(plain, split)
    _, eager = pair()
    reference.copy_weights(build(), eager)
    with pytest.warns(UserWarning, match="one after another"):
        eager.compile("adam", LOSS, metrics=["accuracy"], run_eagerly=True)
    before = eager.evaluate(X, Y, verbose=0)
    eager.fit(X, Y, batch_size=37, epochs=2, verbose=0)
    after = eager.evaluate(X, Y, verbose=0)
    assert after[0] < before[0]


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_sample_weights_and_every_reduction_equal_the_whole_batch(reduction):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    plain, split = pair(reference.Keep, (), loss)
    weight = np.random.default_rng(2).random(len(X)).astype("float32") * 3
    logs = [m.train_on_batch(X, Y, sample_weight=weight) for m in (plain, split)]
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)
    found, expected = reference.gradients_of(split), reference.gradients_of(plain)
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-4, atol=1e-6, err_msg=path)


def masked():
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(9, 8, mask_zero=True, name="a")(tokens)
    x = keras.layers.Dense(8, activation="tanh", name="b")(x)
    return keras.Model(tokens, keras.layers.Dense(3, name="c")(x), name="masked")


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize("ignore_class", [None, 2])
def test_masks_weigh_as_in_the_whole_batch(reduction, ignore_class):
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, ignore_class=ignore_class
    )
    plain, split = pair(reference.Keep, (), loss, masked)
    tokens = np.random.default_rng(3).integers(0, 9, (11, 5)) * (np.arange(11)[:, None] % 5 > 0)
    labels = np.random.default_rng(4).integers(0, 3, (11, 5))
    logs = [m.train_on_batch(tokens, labels) for m in (plain, split)]
    assert logs[1] == pytest.approx(logs[0], rel=1e-5)
    found, expected = reference.gradients_of(split), reference.gradients_of(plain)
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, rtol=1e-4, atol=1e-6, err_msg=path)


def test_what_is_saved_is_the_plain_model(tmp_path):
    _, split = pair()
    split.fit(X, Y, batch_size=10, verbose=0)
    expected = split.predict(X, verbose=0)
    split.save(tmp_path / "own.keras")
    keras.saving.save_model(split, tmp_path / "function.keras")
    for name in ("own.keras", "function.keras"):
        loaded = keras.saving.load_model(tmp_path / name)
        assert type(loaded) is type(build())
        np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6)
        for a, b in zip(loaded.optimizer.variables, split.optimizer.variables, strict=True):
            np.testing.assert_array_equal(a, b)
    split.save_weights(tmp_path / "w.weights.h5")
    fresh = build()
    fresh.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_allclose(fresh(X), expected, rtol=1e-5, atol=1e-6)
    split.export(os.fspath(tmp_path / "exported"), verbose=False)
    served = tf.saved_model.load(os.fspath(tmp_path / "exported"))
    np.testing.assert_allclose(served.serve(X), expected, rtol=1e-5, atol=1e-6)
    clone = keras.models.clone_model(split)
    assert type(clone) is type(build()) and clone.get_config() == split.get_config()


def test_a_trained_model_keeps_its_optimizer_state_when_it_is_split():
    plain = build()
    plain.compile("adam", LOSS)
    whole = keras.models.clone_model(plain)
    whole.compile("adam", LOSS)
    reference.copy_weights(plain, whole)
    for model in (plain, whole):
        model.fit(X, Y, batch_size=37, epochs=3, verbose=0, shuffle=False)
    split = tf_mp.parallelize(plain, cuts=["b"], micro_batches=2)
    for model in (split, whole):
        model.fit(X, Y, batch_size=37, epochs=3, verbose=0, shuffle=False)
    assert int(split.optimizer.iterations.numpy()) == 6
    assert_same(whole, split)


def test_trainable_may_be_toggled_and_compiled_again():
    plain, split = pair()
    for model in (plain, split):
        model.get_layer("b").trainable = False
        model.compile("adam", LOSS)
        model.fit(X, Y, batch_size=10, verbose=0, shuffle=False)
    assert_same(plain, split)


def test_the_summary_names_every_stage_and_the_plan_is_found(capsys):
    _, split = pair()
    lines = []
    split.summary(print_fn=lambda line, **_: lines.append(line))
    text = "\n".join(lines)
    for k in range(3):
        assert f"stage {k} on /device:CPU:{k}" in text
    assert [s.device for s in tf_mp.pipeline_of(split).stages] == [
        f"/device:CPU:{k}" for k in range(3)
    ]
    with pytest.raises(ValueError, match="is not split"):
        tf_mp.pipeline_of(build())


def test_several_stages_may_share_a_device_in_any_order():
    plain = build()
    split = tf_mp.parallelize(
        keras.models.clone_model(plain), cuts=["b", "c"], devices=[1, 0, 1], micro_batches=3
    )
    reference.copy_weights(plain, split)
    for model in (plain, split):
        model.compile("adam", LOSS)
        model.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
    assert_same(plain, split)
    places = [v.value.device[-5:] for v in split.trainable_variables]
    assert places == ["CPU:1", "CPU:1", "CPU:0", "CPU:0", "CPU:1", "CPU:1"]


def test_a_subclassed_model_is_split_when_its_input_is_given():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.a = keras.layers.Dense(8, activation="tanh", name="a")
            self.b = keras.layers.Dense(3, name="b")

        def call(self, x, training=False):
            return self.b(self.a(x))

    model = Own()
    with pytest.raises(ValueError, match=r"inputs=keras.Input"):
        tf_mp.parallelize(model, cuts=["b"])
    split = tf_mp.parallelize(model, cuts=["b"], inputs=keras.Input((6,)), micro_batches=2)
    split.compile("adam", LOSS)
    losses = split.fit(X, Y, epochs=3, batch_size=37, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_custom_layers_with_state_of_their_own_are_merged_once():
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros",
                                         trainable=False, name="calls")  # fmt: skip

        def call(self, x):
            self.calls.assign_add(1)
            return x

    def maker():
        image = keras.Input((6,))
        return keras.Model(image, keras.layers.Dense(3, name="c")(Counting(name="b")(image)))

    split = tf_mp.parallelize(maker, cuts=["c"], micro_batches=4)
    split.compile("sgd", LOSS)
    split.train_on_batch(X, Y)
    assert int(split.get_layer("b").calls.numpy()) == 1


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda shape: keras.random.normal(shape), "SeedGenerator"),
        (lambda shape: tf.random.normal(shape), "stateful tf.random.*RandomStandardNormal"),
    ],
)
def test_a_layer_that_draws_without_a_seed_of_its_own_is_refused_by_name(draw, words):
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + draw(keras.ops.shape(x))

    def maker():
        image = keras.Input((6,))
        return keras.Model(image, keras.layers.Dense(3, name="c")(Noise(name="noise")(image)))

    split = tf_mp.parallelize(maker, cuts=["c"], micro_batches=2)
    split.compile("sgd", LOSS)
    with pytest.raises(ValueError, match=f"'noise' cannot be split.*{words}"):
        split.train_on_batch(X, Y)
