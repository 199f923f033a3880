"""Two ranks, one checkpoint: the root alone touches its disk, and both go on from it."""

import keras
import numpy as np
import pytest

import tf_mp.hvd as hvd
from tf_mp import evaluation, world
from tf_mp.checkpoint import Checkpoints


def build():
    """A model whose weights differ by rank, and that has taken one step."""
    rank = world.current().rank
    keras.utils.set_random_seed(rank)
    layers = [keras.Input((4,), name="x"), keras.layers.Dense(3, name="one"),
              keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.5, name="drop")]
    model = keras.Sequential(layers, name="model")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    model.fit(np.full((4, 4), rank + 1.0), np.ones((4, 3)), batch_size=4, verbose=0)
    return model


@pytest.fixture
def model():
    return build()


def everything(model):
    return [v.numpy().tolist() for v in [*model.variables, *model.optimizer.variables]]


def test_both_ranks_go_on_from_the_roots_checkpoint(model, tmp_path):
    """Each rank has a folder of its own here, as on two hosts without a shared disk."""
    own = tmp_path / str(world.current().rank)
    Checkpoints(own).save(model, 1)
    assert own.exists() == world.current().is_root
    other = build()
    assert Checkpoints(own).restore(other)["step"] == 1
    mine = everything(other)
    assert world.exchange(mine) == [mine, mine]
    roots = world.broadcast(everything(model))
    assert mine == roots


def test_statistics_are_averaged_before_they_are_saved(model, tmp_path):
    means = world.exchange(model.get_layer("norm").moving_mean.numpy().tolist())
    assert means[0] != means[1]
    Checkpoints(tmp_path / str(world.current().rank)).save(model, 1)
    found = model.get_layer("norm").moving_mean.numpy()
    np.testing.assert_allclose(found, np.mean(means, axis=0), rtol=1e-6)


def test_a_root_that_cannot_write_is_an_error_on_both(model, tmp_path):
    folder = tmp_path / "file"
    folder.touch()
    with pytest.raises(OSError, match="while writing the checkpoint of step 1"):
        Checkpoints(folder).save(model, 1)


def test_a_checkpoint_of_another_model_is_an_error_on_both(model, tmp_path):
    checkpoints = Checkpoints(tmp_path / str(world.current().rank))
    checkpoints.save(model, 1)
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    other.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    with pytest.raises(ValueError, match="of another model"):
        checkpoints.restore(other)


def test_evaluation_counts_each_sample_once_whatever_the_ranks_shares():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    images = np.random.default_rng(0).random((7, 4), np.float32)
    labels = np.arange(7) % 3
    whole = model.evaluate(images, labels, verbose=0, return_dict=True)
    share = slice(0, 5) if world.current().is_root else slice(5, 7)
    found = evaluation.evaluate(model, images[share], labels[share])
    assert found == pytest.approx(whole, rel=1e-6)
    assert world.exchange(found) == [found, found]
