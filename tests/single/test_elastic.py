"""What an elastic run keeps in memory, and how a round goes on from it; with one rank."""

import keras
import numpy as np
import pytest

from tf_mp import elastic, pipeline, world
from tf_mp.elastic import Memory

IMAGES, LABELS = np.random.default_rng(0).random((12, 3), np.float32), np.arange(12) % 2
FRESH = {"global_batch": 16, "global_micro_batches": 8}


def model():
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(0.1), loss, run_eagerly=True)
    return net


def fit(net, memory, first_step, count):
    data = IMAGES[: 2 * count], LABELS[: 2 * count]
    net.fit(*data, batch_size=2, shuffle=False, verbose=0, callbacks=[memory.callback(first_step)])


def values(net):
    return [v.numpy() for v in [*net.variables, *net.optimizer.variables]]


def test_a_new_model_gets_the_weights_and_the_optimizer_of_the_kept_step():
    memory = Memory(active=True, every=3)
    first = model()
    fit(first, memory, 4, 5)
    assert memory.step == 9  # the last step is kept too
    first.train_on_batch(IMAGES, LABELS)  # is lost: it is not kept
    second = model()
    assert memory.restore(second) == 9
    assert int(second.optimizer.iterations) == 5
    third = model()
    assert memory.restore(third) == 9
    for one, other, lost in zip(values(second), values(third), values(first), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.ndim == 0 or not np.array_equal(one, lost)


def test_every_few_global_steps_are_kept_and_then_the_ranks_are_looked_at():
    memory, seen = Memory(active=True, every=4), []
    memory.look = lambda: seen.append(memory.step)
    fit(model(), memory, 2, 6)
    assert seen == [4, 8]


def test_a_run_whose_ranks_do_not_change_keeps_nothing():
    memory = Memory()
    fit(model(), memory, 0, 3)
    assert memory.step is None
    assert memory.restore(model()) is None
    ran = []
    elastic.run(ran.append, memory)
    assert ran == [memory]


def test_the_step_of_the_rank_that_kept_most_counts(monkeypatch):
    memory = Memory(active=True)
    memory.keep(model(), 7)
    sent = []
    monkeypatch.setattr(world, "exchange", lambda ours, what: [None, 5, ours])
    monkeypatch.setattr(world, "current", lambda: world.World(rank=2, size=3))
    monkeypatch.setattr(
        "tf_mp.hvd.broadcast_variables", lambda variables, root_rank: sent.append(root_rank)
    )
    assert memory.restore(model()) == 7
    assert sent == [2]


def test_the_plan_is_that_of_an_earlier_round_then_the_checkpoints_then_the_roots(monkeypatch):
    former = {"global_batch": 40, "global_micro_batches": 4, "seed": 0}
    assert Memory(active=True).plan(FRESH, {}) == FRESH
    assert Memory(active=True).plan(FRESH, {"seed": 0}) == FRESH
    kept = {"global_batch": 40, "global_micro_batches": 4}
    assert Memory(active=True).plan(FRESH, former) == kept
    assert Memory().plan(FRESH, former) == FRESH  # fixed ranks: another batch is an error later
    earlier = {"global_batch": 24, "global_micro_batches": 8}
    new = Memory(active=True)
    monkeypatch.setattr(world, "exchange", lambda ours, what: [ours, [earlier, FRESH]])
    assert new.plan(FRESH, former) == earlier
    monkeypatch.undo()
    assert new.plan(FRESH, {}) == earlier


def test_an_elastic_run_needs_the_elastic_launcher(monkeypatch):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    with pytest.raises(ValueError, match="--host-discovery-script"):
        elastic.run(print, Memory(active=True))
    with pytest.raises(ValueError, match="every=0"):
        Memory(every=0)


def test_tags_of_pipelines_count_from_zero_again_after_a_change_of_ranks():
    next(pipeline._tags)
    pipeline.restart_tags()
    assert next(pipeline._tags) == 0
