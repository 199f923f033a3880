"""Ranks must not choose different cuts: the root rank measures, all get its figures."""

import keras
import pytest

from tf_mp import cost, graph, world


def traced_model():
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(64, name="hidden")(inputs)
    return graph.trace(keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden)))


def test_every_rank_has_the_costs_that_the_root_rank_measured():
    assert world.current().size > 1
    costs = cost.measured(traced_model(), sample(), device="/device:CPU:0", repeats=1)
    everyone = world.exchange(costs, what="costs")
    assert [row[0] for row in everyone[0]] == ["hidden", "logits"]
    assert all(rows == everyone[0] for rows in everyone)


def sample():
    return cost.sample_of(traced_model(), 4)


def test_a_failure_of_the_root_rank_ends_every_rank(monkeypatch):
    def fail(*_):
        raise ValueError("no memory left")

    monkeypatch.setattr(cost, "measure", fail)
    expected = ValueError if world.current().is_root else RuntimeError
    with pytest.raises(expected, match="no memory left"):
        cost.measured(traced_model(), sample(), device="/device:CPU:0")
