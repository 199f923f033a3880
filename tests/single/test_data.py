"""Every world size sees the same global batches; nothing is lost; a run resumes at any step."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tf_mp import data, idx, sources
from tf_mp.dealing import Share

NUM_TRAIN, NUM_TEST = 250, 103


def numbered(count):
    """Images that carry their own number in two pixels, and labels."""
    images = np.zeros((count, 28, 28), np.uint8)
    images[:, 0, 0], images[:, 0, 1], images[:, 27, 27] = np.arange(count) % 256, 0, 255
    return images, (np.arange(count) % 10).astype(np.uint8)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("data")
    idx.write_folder(files, {"train": numbered(NUM_TRAIN), "test": numbered(NUM_TEST)})
    data.prepare("numbered", folder, files)
    return folder


@pytest.fixture(params=["memory", "stream"])
def source(request, monkeypatch):
    if request.param == "stream":
        monkeypatch.setattr(sources, "MEMORY_BYTES", 0)
        monkeypatch.setattr(sources, "WINDOW", 64)
    return request.param


def load(data_dir, rank=0, size=1, split="train", batch_size=20, seed=3, **settings):
    world = SimpleNamespace(rank=rank, size=size)
    where = {"world": world, "data_dir": data_dir}
    return data.load("numbered", split, batch_size=batch_size, seed=seed, **where, **settings)


def numbers(batches):
    """The sample numbers of each batch, read from the pixels."""
    return [np.rint(images[:, 0, 0, 0] * 255).astype(int).tolist() for images, _ in batches]


def global_batches(data_dir, size, global_batch=40, **settings):
    ranks = [
        numbers(load(data_dir, rank, size, batch_size=global_batch // size, **settings))
        for rank in range(size)
    ]
    return [sum(parts, []) for parts in zip(*ranks, strict=True)]


def test_global_batches_are_the_same_for_every_world_size(data_dir, source):
    alone = global_batches(data_dir, 1, steps=14)
    for size in (2, 4) if source == "memory" else (2,):
        assert alone == global_batches(data_dir, size, steps=14)


def test_unequal_shares_make_the_same_global_batches(data_dir, source):
    alone = global_batches(data_dir, 1, steps=8)
    shares = [Share.of(40, 8, rank, 3) for rank in range(3)]
    ranks = [numbers(load(data_dir, r, 3, share=s, steps=8)) for r, s in enumerate(shares)]
    assert [len(parts[0]) for parts in ranks] == [15, 15, 10]
    assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == alone


def test_an_epoch_has_each_sample_once_at_most_and_the_next_has_another_order(data_dir, source):
    batches = global_batches(data_dir, 1, steps=12)
    first, second = sum(batches[:6], []), sum(batches[6:], [])
    assert len(set(first)) == len(first) == len(set(second)) == len(second) == 240
    assert first != second and first != sorted(first)


def test_another_seed_gives_another_order_and_the_same_seed_the_same(data_dir, source):
    tf.random.set_seed(1)  # As ranks may: the order must not hang on it.
    one = global_batches(data_dir, 1, seed=3)
    tf.random.set_seed(2)
    assert one == global_batches(data_dir, 1, seed=3)
    assert one != global_batches(data_dir, 1, seed=4)


def test_a_run_resumes_at_any_step_in_any_epoch(data_dir, source):
    whole = global_batches(data_dir, 1, steps=15)
    for start in (5, 6, 11, 14) if source == "memory" else (11,):
        assert global_batches(data_dir, 1, start_step=start, steps=15 - start) == whole[start:]


def test_without_steps_the_epoch_is_delivered_to_its_end(data_dir):
    assert load(data_dir, batch_size=40).cardinality() == 6
    assert load(data_dir, batch_size=40, start_step=8).cardinality() == 4


def test_resuming_decodes_nothing_that_is_skipped(data_dir, source, monkeypatch):
    ran = []
    kind = sources._Memory if source == "memory" else sources._Stream
    original = kind.decode

    def counted(self, keys):
        labels = original(self, keys)
        tf.py_function(lambda: ran.append(1), [], [])
        return labels

    monkeypatch.setattr(kind, "decode", counted)
    assert len(list(load(data_dir, start_step=1000, steps=2))) == 2
    assert len(ran) == 2


def test_images_are_scaled_floats_of_a_fixed_batch_shape(data_dir, source):
    batches = load(data_dir, steps=1)
    images, labels = next(iter(batches))
    assert batches.element_spec == (
        tf.TensorSpec((20, 28, 28, 1), tf.float32),
        tf.TensorSpec((20,), tf.int64),
    )
    assert float(tf.reduce_max(images)) == 1.0 and float(tf.reduce_min(images)) == 0.0
    assert (np.array(numbers([(images, labels)])[0]) % 10 == labels.numpy()).all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_evaluation_deals_every_sample_once_in_as_many_steps_on_each_rank(data_dir, source, size):
    ranks = [
        numbers(load(data_dir, rank, size, split="test", batch_size=17, shuffle=False))
        for rank in range(size)
    ]
    assert sorted(sum(sum(ranks, []), [])) == list(range(NUM_TEST))
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batches for batches in sum(ranks, []))


def test_what_is_left_over_is_said_once_by_the_root_rank(data_dir, capsys):
    load(data_dir, 0, 2, batch_size=20)
    assert "250 samples fill 6 global batches of 40; 10 are left over" in capsys.readouterr().err
    load(data_dir, 1, 2, batch_size=20)
    load(data_dir, 0, 2, batch_size=25)
    assert "left over" not in capsys.readouterr().err


def test_a_set_that_is_not_prepared_is_an_error_that_says_the_command(tmp_path):
    with pytest.raises(data.DataError, match=f"--dataset numbered --data-dir {tmp_path}"):
        load(tmp_path)


def test_settings_that_contradict_each_other_are_errors(data_dir):
    with pytest.raises(ValueError, match="deals one whole epoch"):
        load(data_dir, shuffle=False, steps=3)
    with pytest.raises(ValueError, match="Expected 0 or more"):
        load(data_dir, start_step=-1)


def test_images_from_0_to_255_warn_once(monkeypatch):
    monkeypatch.setattr(data, "_warned", set())
    with pytest.warns(UserWarning, match="values from 0 to 255. Expected"):
        assert not data.check_range(tf.constant([[0.0, 255.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not data.check_range(tf.constant([[0.0, 255.0]]))


def test_images_in_range_do_not_warn_and_not_a_number_does(monkeypatch):
    monkeypatch.setattr(data, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert data.check_range(np.array([0.0, 0.5, 1.0]))
    with pytest.warns(UserWarning):
        assert not data.check_range(np.array([0.0, float("nan")]))
