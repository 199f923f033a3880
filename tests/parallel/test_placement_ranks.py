"""The proof at several ranks: reductions belong to their stage, and none may be missing."""

import keras
import numpy as np
import pytest

import tf_mp
import tf_mp.hvd as hvd
from tf_mp import opnames


def proof_of(optimizer):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((10,))
    hidden = keras.layers.Dense(12, activation="relu", name="first")(inputs)
    outputs = keras.layers.Dense(12, name="second")(hidden)
    model = tf_mp.parallelize(keras.Model(inputs, outputs), cuts=["second"], micro_batches=2)
    model.compile(optimizer, "mse")
    draw = np.random.default_rng(tf_mp.current_world().rank)
    return tf_mp.verify_placement(model, (draw.random((8, 10)), draw.random((8, 12))))


def test_each_stages_gradients_are_reduced_on_its_device():
    proof = proof_of(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    proof.raise_for_strays()
    for stage in range(2):
        kinds = proof.kinds(stage, opnames.COLLECTIVE)
        assert sum(count for kind, count in kinds.items() if kind.startswith("Horovod")) == 1


def test_all_gradients_may_be_reduced_on_one_device_as_on_gpus(monkeypatch):
    one = lambda device: device.rpartition(":")[0] + ":0"  # noqa: E731
    monkeypatch.setattr(hvd.reduction, "device_of", one)
    proof = proof_of(hvd.DistributedOptimizer(keras.optimizers.SGD()))
    proof.raise_for_strays()
    kinds = [proof.kinds(stage, opnames.COLLECTIVE) for stage in range(2)]
    counts = [sum(n for kind, n in row.items() if kind.startswith("Horovod")) for row in kinds]
    assert counts == [2, 0]


def test_under_nccl_all_gpus_of_a_process_reduce_on_the_first(monkeypatch):
    monkeypatch.setattr(hvd.reduction, "nccl_built", lambda: True)
    assert hvd.reduction.device_of("/device:GPU:1") == "/device:GPU:0"
    assert hvd.reduction.device_of("/job:localhost/device:GPU:3").endswith("/device:GPU:0")
    assert hvd.reduction.device_of("/device:CPU:1") == "/device:CPU:1"
    monkeypatch.setattr(hvd.reduction, "nccl_built", lambda: False)
    assert hvd.reduction.device_of("/device:GPU:1") == "/device:GPU:1"


def test_a_step_that_reduces_nothing_is_not_proved(monkeypatch):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    monkeypatch.setattr(type(optimizer), "reduce_gradients", lambda self, gradients, _: gradients)
    proof = proof_of(optimizer)
    assert not proof.ok
    with pytest.raises(RuntimeError, match="no gradient was reduced over the 2 ranks"):
        proof.raise_for_strays()
