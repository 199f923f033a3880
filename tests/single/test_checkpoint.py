"""A checkpoint is whole or not there, opens with plain Keras, and brings training back exactly."""

import errno
import json

import keras
import numpy as np
import pytest

import tf_mp
from tf_mp import checkpoint
from tf_mp.checkpoint import CheckpointCallback, Checkpoints

IMAGES = np.random.default_rng(0).random((40, 6), np.float32)
LABELS = np.arange(40) % 3


def model(optimizer="adam", units=8):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(units, "relu"), keras.layers.Dropout(0.5),
              keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    net = keras.Sequential(layers)
    optimizers = {"adam": keras.optimizers.Adam(0.01),
                  "amsgrad": keras.optimizers.Adam(0.01, amsgrad=True),
                  "rmsprop": keras.optimizers.RMSprop(0.01, momentum=0.9)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizers[optimizer], loss=loss, run_eagerly=True)
    return net


def train(net, first, last):
    for step in range(first, last):
        batch = slice(4 * step, 4 * step + 4)
        net.train_on_batch(IMAGES[batch], LABELS[batch])


def values(net):
    return [v.numpy() for v in [*net.variables, *net.optimizer.variables]]


def test_a_checkpoint_opens_with_plain_keras(tmp_path):
    net = model()
    train(net, 0, 2)
    Checkpoints(tmp_path).save(net, 2, configuration={"seed": 3})
    path = tmp_path / "step-00000002"
    loaded = keras.models.load_model(path / "model.keras")
    np.testing.assert_array_equal(loaded(IMAGES), net(IMAGES))
    state = json.loads((path / "state.json").read_text())
    assert (state["step"], state["configuration"]) == (2, {"seed": 3})
    assert {"tensorflow", "keras"} <= set(state["versions"])


def test_what_the_newest_whole_checkpoint_was_made_with_is_read_without_a_model(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.configuration() == {} == Checkpoints(None).configuration()
    checkpoints.save(model(), 1, configuration={"global_batch": 16})
    checkpoints.save(model(), 2, configuration={"global_batch": 24})
    assert checkpoints.configuration() == {"global_batch": 24}
    (tmp_path / "step-00000002" / "model.keras").write_bytes(b"damaged")
    assert checkpoints.configuration() == {"global_batch": 16}


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_ten_steps_equal_five_a_restart_and_five(tmp_path, optimizer):
    whole = model(optimizer)
    train(whole, 0, 10)
    first = model(optimizer)
    train(first, 0, 5)
    Checkpoints(tmp_path).save(first, 5)
    second = model(optimizer)
    train(second, 7, 8)  # other weights, and dropout's random state has moved
    assert Checkpoints(tmp_path).restore(second)["step"] == 5
    train(second, 5, 10)
    for expected, found in zip(values(whole), values(second), strict=True):
        np.testing.assert_array_equal(expected, found)


def test_without_a_checkpoint_nothing_is_restored(tmp_path):
    assert Checkpoints(tmp_path / "absent").restore(model()) is None


@pytest.fixture
def two(tmp_path):
    """Checkpoints of step 1 and 2."""
    net = model()
    for step in (1, 2):
        train(net, step, step + 1)
        Checkpoints(tmp_path).save(net, step)
    return tmp_path


@pytest.mark.parametrize("name", ["model.keras", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "flipped"])
def test_a_damaged_checkpoint_is_skipped_with_a_word(two, capsys, name, damage):
    file = two / "step-00000002" / name
    data = file.read_bytes()
    middle = len(data) // 2
    broken = {"cut": data[:middle], "empty": b"",
              "flipped": data[:middle] + b"\x00\xff" + data[middle + 2 :]}
    file.unlink()
    if damage in broken:
        file.write_bytes(broken[damage])
    assert Checkpoints(two).restore(model())["step"] == 1
    assert "skipping the damaged checkpoint" in capsys.readouterr().err


def test_a_kill_in_the_middle_of_a_save_leaves_the_last_one_whole(two, monkeypatch):
    net = model()
    for moment in ("_digest", "_flush"):
        with monkeypatch.context() as patch:

            def die(path, patch=patch):
                patch.setattr(checkpoint.shutil, "rmtree", lambda *a, **k: None)
                raise KeyboardInterrupt

            patch.setattr(checkpoint, moment, die)
            with pytest.raises(KeyboardInterrupt):
                Checkpoints(two).save(net, 3)
        assert (two / ".new-step-00000003").exists()
        assert Checkpoints(two).restore(model())["step"] == 2
    Checkpoints(two).save(net, 3)
    assert sorted(path.name for path in two.iterdir()) == [f"step-0000000{i}" for i in (1, 2, 3)]


def test_a_full_disk_is_an_error_that_keeps_the_last_one(two, monkeypatch):
    def full(path, **kwargs):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    net = model()
    monkeypatch.setattr(net, "save", full)
    with pytest.raises(OSError, match=r"No space left on device, while writing .* of step 3"):
        Checkpoints(two).save(net, 3)
    assert sorted(path.name for path in two.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_checkpoint_of_another_model_is_refused(two):
    with pytest.raises(ValueError, match="of another model"):
        Checkpoints(two).restore(model(units=9))


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [("rmsprop", "a run with Adam. Expected: RMSprop"), ("amsgrad", "does not fit this model")],
)
def test_a_checkpoint_of_another_optimizer_is_refused(two, optimizer, words):
    with pytest.raises(ValueError, match=words):
        Checkpoints(two).restore(model(optimizer))


def test_the_newest_ones_and_the_best_one_are_kept(tmp_path):
    net, checkpoints = model(), Checkpoints(tmp_path, keep=2)
    for step, score in enumerate([5.0, 1.0, 3.0, 2.0, 4.0]):
        checkpoints.save(net, step, score=score)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "3", "4"]
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_the_callback_saves_every_few_steps_and_at_the_end_and_counts_on_after_a_resume(tmp_path):
    for first, last in [(0, 5), (5, 7)]:
        net = model()
        Checkpoints(tmp_path).restore(net)
        saver = CheckpointCallback(Checkpoints(tmp_path, keep=9), 2, first_step=first)
        net.fit(IMAGES, LABELS, batch_size=4, steps_per_epoch=last - first, verbose=0,
                callbacks=[saver])
    assert sorted(int(path.name[-1]) for path in tmp_path.iterdir()) == [2, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="at least 1 step"):
        CheckpointCallback(tmp_path, 0)


def split(balance, micro_batches):
    """The same layers in other stages; no dropout, whose masks depend on the micro-batches."""
    keras.utils.set_random_seed(len(balance))
    layers = [keras.layers.Dense(7, "tanh", name=f"dense_{i}") for i in range(3)]
    net = keras.Sequential([keras.Input((6,)), *layers])
    net = tf_mp.parallelize(net, cuts=balance, micro_batches=micro_batches)
    net.compile(keras.optimizers.Adam(0.01), "mse")
    return net


def test_a_checkpoint_goes_on_in_other_stages_and_micro_batches(tmp_path):
    def losses(net, steps):
        return [float(net.train_on_batch(IMAGES[:8], IMAGES[8:16, :1])) for _ in range(steps)]

    first = split([2, 1], 4)
    losses(first, 3)
    Checkpoints(tmp_path).save(first, 3)
    first.reset_metrics()
    expected = losses(first, 5)
    for balance, micro_batches in [([1, 1, 1], 3), ([3], 4)]:
        other = split(balance, micro_batches)
        assert Checkpoints(tmp_path).restore(other)["step"] == 3
        np.testing.assert_allclose(losses(other, 5), expected, rtol=1e-5)
