"""Two ranks with m micro-batches each equal one plain model on all 2m of them."""

import keras
import numpy as np
import pytest
import reference

import tf_mp
import tf_mp.hvd as hvd
from tf_mp import training
from tf_mp.dealing import Share

WORLD = tf_mp.current_world()
LOSS = {"from_logits": True}


def plain():
    """Masks, dropout, a regulariser and batch normalisation; state that ranks must agree on."""
    tokens = keras.Input((5,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(9, 6, mask_zero=True, name="a", embeddings_regularizer="l2")(tokens)
    x = keras.layers.Dense(8, activation="tanh", name="b")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(0.4, seed=5, name="dropout")(x)
    return keras.Model(tokens, keras.layers.Dense(3, name="c")(x), name="masked")


def data():
    random = np.random.default_rng(3)
    lengths = random.integers(1, 6, 16)
    tokens = random.integers(1, 9, (16, 5)) * (np.arange(5) < lengths[:, None])
    return tokens, random.integers(0, 3, (16, 5)), random.random(16).astype("float32") + 0.1


def local(array):
    """This rank's half of a global batch."""
    return np.split(array, WORLD.size)[WORLD.rank]


@pytest.mark.parametrize(
    ("reduction", "micro_batches"),
    [("sum_over_batch_size", 4), ("sum", 4), ("mean_with_sample_weight", 4), ("sum", 3),
     ("sum_over_batch_size", 3)],
)
def test_two_ranks_equal_one_on_the_global_batch(reduction, micro_batches):
    """Three micro-batches: one rank has two of them and the other one, and fewer samples."""
    assert WORLD.size == 2
    x, y, _ = data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    whole = plain()
    share = Share.of(len(x), micro_batches, WORLD.rank, WORLD.size)
    split = tf_mp.parallelize(
        keras.models.clone_model(whole), cuts=["norm"], micro_batches=share.micro_batches
    )
    if micro_batches == 3:  # else every rank has as many: nothing needs to be said
        tf_mp.pipeline_of(split).first_micro_batch = share.first_micro_batch
    reference.copy_weights(whole, split)
    split.compile(hvd.DistributedOptimizer(reference.Keep()), loss)
    own = slice(share.start, share.stop)
    split.train_on_batch(x[own], y[own])
    expected, state, _ = reference.step(whole, [loss], x, y, micro_batches)
    found = reference.gradients_of(split)
    # A bias before batch normalisation has almost no gradient: large terms that cancel.
    size = max(1.0, *(np.abs(gradient).max() for gradient in expected.values()))
    for path, gradient in expected.items():
        np.testing.assert_allclose(
            found[path], gradient, rtol=1e-4, atol=2e-6 * size, err_msg=path
        )
    after = {v.path: v.numpy() for v in split.non_trainable_variables}
    for path, value in state.items():
        np.testing.assert_allclose(after[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


def test_weights_stay_equal_over_steps_and_an_unwrapped_optimizer_is_refused():
    x, y, _ = data()
    keras.utils.set_random_seed(11 + WORLD.rank)  # different weights on each rank, until broadcast
    split = tf_mp.parallelize(plain, cuts=["norm"], micro_batches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(**LOSS)
    with pytest.raises(ValueError, match="world size 2"):
        split.compile(keras.optimizers.Adam(), loss)
    split.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss)
    split.fit(
        local(x), local(y), batch_size=4, epochs=2, verbose=0, shuffle=False,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )  # fmt: skip
    digests = tf_mp.world.exchange(training.digest_of_weights(split), what="digests")
    assert digests[0] == digests[1]


def test_the_proof_holds_with_collectives_on_their_stage():
    x, y, _ = data()
    split = tf_mp.parallelize(plain, cuts=["norm"], micro_batches=2)
    loss = keras.losses.SparseCategoricalCrossentropy(**LOSS)
    split.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss)
    proof = tf_mp.verify_placement(split, (local(x), local(y)))
    proof.raise_for_strays()
    for stage in (0, 1):
        assert sum(proof.kinds(stage, "collective").values()) > 0


def test_accumulated_micro_batches_of_two_ranks_equal_one_large_batch():
    """Two steps of two micro-batches on two ranks are one plain step on all of it."""

    def build():
        inputs = keras.Input((5,))
        x = keras.layers.Dense(6, activation="tanh", name="hidden")(inputs)
        return keras.Model(inputs, keras.layers.Dense(2, name="out")(x))

    random = np.random.default_rng(5)
    x, y = random.normal(size=(16, 5)), random.normal(size=(16, 2))
    whole = build()
    split = tf_mp.parallelize(keras.models.clone_model(whole), cuts=["out"], micro_batches=2)
    reference.copy_weights(whole, split)
    whole.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    accumulating = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
    split.compile(hvd.DistributedOptimizer(accumulating), "mse")
    start = [v.numpy() for v in split.trainable_variables]
    for _ in range(2):  # the second time the momentum counts too
        whole.train_on_batch(x, y)
        split.train_on_batch(local(x)[:4], local(y)[:4])
        split.train_on_batch(local(x)[4:], local(y)[4:])
    for ours, plains, first in zip(
        split.trainable_variables, whole.trainable_variables, start, strict=True
    ):
        np.testing.assert_allclose(ours, plains, rtol=1e-5, atol=1e-6, err_msg=ours.path)
        assert np.abs(first - ours.numpy()).max() > 1e-3
