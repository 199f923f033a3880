"""Measured costs: exact bytes, times by a clock that the test winds, a model left as it was."""

import json
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_mp
from tf_mp import affinity, cost, graph, models, timing, world
from tf_mp.cost import OperationCost

CPU = "/device:CPU:0"


@pytest.fixture
def clock(monkeypatch):
    """Times by a list instead of a clock: each measurement takes the next row."""
    rows, asked = [], []

    def take(runs, repeats, pick):
        for run in runs:
            run().numpy()  # it must at least run
        asked.append(len(runs))
        return (rows.pop(0) if rows else [1.0, 3.0, 8.0])[: len(runs)]

    monkeypatch.setattr(timing, "time_functions", take)
    take.rows, take.asked = rows, asked
    return take


def chain(*layers, shape=(4,)):
    inputs = keras.Input(shape, name="x")
    x = inputs
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def measured(model, micro_batch=5):
    traced = graph.trace(model)
    return cost.measure(traced, cost.sample_of(traced, micro_batch), CPU, repeats=1)


def test_every_operation_of_the_seed_network_has_its_exact_bytes(clock):
    rows = measured(models.build_model(), micro_batch=2)
    assert [(r.name, r.weight_bytes, r.state_bytes, r.output_bytes) for r in rows] == [
        ("conv1", 4 * (25 * 32 + 32), 0, (2 * 28 * 28 * 32 * 4,)),
        ("pool1", 0, 0, (2 * 14 * 14 * 32 * 4,)),
        ("conv2", 4 * (25 * 32 * 64 + 64), 0, (2 * 14 * 14 * 64 * 4,)),
        ("pool2", 0, 0, (2 * 7 * 7 * 64 * 4,)),
        ("flatten", 0, 0, (2 * 3136 * 4,)),
        ("dense", 4 * (3136 * 1024 + 1024), 0, (2 * 1024 * 4,)),
        ("dropout", 0, 16, (2 * 1024 * 4,)),
        ("logits", 4 * (1024 * 10 + 10), 0, (2 * 10 * 4,)),
    ]


def test_times_are_without_the_call_and_without_a_second_forward(clock):
    clock.rows += [[1.0, 3.0, 8.0], [2.0, 2.5, 4.5]]
    rows = measured(chain(keras.layers.Dense(3), keras.layers.Dense(2)))
    assert [(r.forward_ms, r.backward_ms, r.cost_ms) for r in rows] == [(2, 5, 7), (0.5, 2, 2.5)]


def test_noise_never_makes_a_time_negative(clock):
    clock.rows += [[2.0, 1.0, 0.5]]
    (row,) = measured(chain(keras.layers.Dense(3)))
    assert (row.forward_ms, row.backward_ms) == (0, 0)


def test_an_operation_without_a_gradient_has_no_backward(clock):
    model = chain(keras.layers.Rescaling(0.5), keras.layers.Dense(2), keras.layers.ReLU())
    rows = measured(model)
    assert [r.backward_ms for r in rows] == [0, 5, 5]
    assert clock.asked == [2, 3, 3]  # the pair of forward and backward was not even run


def test_equal_layers_are_measured_once(clock):
    layers = [keras.layers.Dense(4) for _ in range(5)]
    model = chain(*layers, keras.layers.Dense(4, activation="relu"))
    layers[4].kernel.trainable = False
    rows = measured(model)
    # The first has no input gradient, the next three are equal, then a frozen and another one.
    assert len(clock.asked) == 4
    assert len(rows) == 6


def test_a_shared_layer_counts_its_weights_once(clock):
    shared = keras.layers.Dense(4, name="shared")
    rows = measured(chain(shared, keras.layers.ReLU(), shared))
    assert [(r.name, r.weight_bytes) for r in rows] == [
        ("shared", 80),
        ("re_lu", 0),
        ("shared:1", 0),
    ]


def test_measuring_changes_nothing_of_the_model(clock):
    model = models.two_in_two_out()  # with dropout, batch normalisation and regularisers
    before = [v.numpy() for v in model.variables]
    keras.utils.set_random_seed(5)
    measured(model)
    drawn = keras.random.normal([3])
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy(), err_msg=variable.path)
    keras.utils.set_random_seed(5)
    np.testing.assert_array_equal(drawn, keras.random.normal([3]))


class SeesMask(keras.layers.Layer):
    """Writes down whether it got a mask."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.seen = []

    def call(self, x, mask=None):
        self.seen.append(mask is not None)
        return x


def test_masks_reach_the_operations_that_use_them(clock):
    sees = SeesMask()
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(8, 4, mask_zero=True)(tokens)
    model = keras.Model(tokens, keras.layers.GlobalAveragePooling1D()(sees(x)))
    sees.seen.clear()
    measured(model)
    assert sees.seen and all(sees.seen)


def test_a_stage_is_run_with_the_masks_that_it_is_given():
    steps = keras.Input((3, 2))
    traced = graph.trace(keras.Model(steps, keras.layers.GlobalAveragePooling1D()(steps)))
    x = np.arange(6, dtype="float32").reshape(1, 3, 2)
    alone = timing.alone(traced.operations[0], CPU)
    assert timing.StageRun(alone, [tf.constant(x)], [None]).outputs[0].numpy().tolist() == [[2, 3]]
    run = timing.StageRun(alone, [tf.constant(x)], [tf.constant([[True, False, False]])])
    assert run.outputs[0].numpy().tolist() == [[0, 1]]


def test_a_large_operation_is_measured_slower_than_a_small_one():
    rows = measured(
        chain(keras.layers.Dense(2), keras.layers.Dense(2048), keras.layers.Dense(2048)),
        micro_batch=128,
    )
    assert rows[2].cost_ms > rows[0].cost_ms
    assert rows[2].forward_ms > 0


def test_what_crosses_includes_tensors_that_skip_over_the_cut(clock):
    inputs = keras.Input((4,))
    a = keras.layers.Dense(8, name="a")(inputs)
    b = keras.layers.Dense(2, name="b")(a)
    c = keras.layers.Dense(3, name="c")(b)
    d = keras.layers.Concatenate(name="d")([a, c])
    model = keras.Model(inputs, [d, b])
    traced = graph.trace(model)
    costs = cost.measure(traced, cost.sample_of(traced, 10), CPU, repeats=1)
    rows = cost.as_balance(traced, costs)
    # After a: a (8). After b: a and b. After c: a (for d) and c; b is a result, no one's input.
    assert [(r.name, r.cross_bytes // 40) for r in rows] == [
        ("a", 8),
        ("b", 10),
        ("c", 11),
        ("d", 0),
    ]
    assert [r.activation_bytes // 40 for r in rows] == [8, 2, 3, 11]
    assert [r.cost_ms for r in rows][:2] == [7, 7]


def test_made_up_samples_fit_the_model_and_are_the_same_each_time():
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    image = keras.Input((4, 4, 1), name="image")
    flat = keras.layers.Flatten()(image)
    pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(3, 2)(tokens))
    traced = graph.trace(keras.Model([tokens, image], keras.layers.Concatenate()([flat, pooled])))
    first, second = cost.sample_of(traced, 3), cost.sample_of(traced, 3)
    assert [(tuple(t.shape), t.dtype.name) for t in first] == [
        ((3, 32), "int32"),
        ((3, 4, 4, 1), "float32"),
    ]
    assert first[0].numpy().min() == first[0].numpy().max() == 1
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


# --- cache and ranks -------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Counts real measurements, and makes each quick."""
    calls = []

    def count(traced, sample, device, repeats):
        calls.append(device)
        return [OperationCost(op.name, 1.0, 2.0, 3, 4, (5,)) for op in traced.operations]

    monkeypatch.setattr(cost, "measure", count)
    return calls


def test_without_a_cache_every_call_measures(counted, monkeypatch):
    monkeypatch.delenv(cost.CACHE_VARIABLE, raising=False)
    traced = graph.trace(chain(keras.layers.Dense(2)))
    for _ in range(2):
        cost.measured(traced, cost.sample_of(traced, 3), device=CPU)
    assert len(counted) == 2


def test_a_cache_is_read_for_the_same_model_shapes_and_kind_of_device(counted, tmp_path):
    file = tmp_path / "new" / "costs.json"

    def run(units=2, micro_batch=3, device=CPU):
        traced = graph.trace(chain(keras.layers.Dense(units, name="dense")))
        return cost.measured(
            traced, cost.sample_of(traced, micro_batch), device=device, cache=file
        )

    first = run()
    assert run() == first == [OperationCost("dense", 1.0, 2.0, 3, 4, (5,))]
    assert run(device="/device:CPU:1") == first
    assert len(counted) == 1
    run(units=4)
    run(micro_batch=4)
    run(device="/device:GPU:0")
    assert len(counted) == 4
    run()
    assert len(counted) == 4
    assert len(json.loads(file.read_text())) == 4
    assert [p.name for p in file.parent.iterdir()] == ["costs.json"]


def test_the_environment_can_name_the_cache(counted, tmp_path, monkeypatch):
    monkeypatch.setenv(cost.CACHE_VARIABLE, str(tmp_path / "costs.json"))
    traced = graph.trace(chain(keras.layers.Dense(2)))
    for _ in range(2):
        cost.for_partition(traced, 2)
    assert len(counted) == 1


def as_rank(monkeypatch, rank, root_answer=None):
    monkeypatch.setattr(world, "current", lambda: world.World(rank, 2, rank, 2))
    sent = []

    def broadcast(value, *, what):
        sent.append(json.loads(json.dumps(value)))
        return sent[-1] if rank == 0 else root_answer

    monkeypatch.setattr(world, "broadcast", broadcast)
    return sent


def test_only_the_root_rank_measures_and_the_others_take_its_figures(counted, monkeypatch):
    traced = graph.trace(chain(keras.layers.Dense(2)))
    sent = as_rank(monkeypatch, 0)
    at_root = cost.measured(traced, cost.sample_of(traced, 3), device=CPU)
    as_rank(monkeypatch, 1, sent[0])
    assert cost.measured(traced, cost.sample_of(traced, 3), device=CPU) == at_root
    assert len(counted) == 1


def test_a_failure_of_the_root_rank_reaches_every_rank(monkeypatch):
    def fail(*_):
        raise ValueError("out of memory")

    monkeypatch.setattr(cost, "measure", fail)
    traced = graph.trace(chain(keras.layers.Dense(2)))
    sent = as_rank(monkeypatch, 0)
    with pytest.raises(ValueError, match="out of memory"):
        cost.measured(traced, cost.sample_of(traced, 3), device=CPU)
    as_rank(monkeypatch, 1, sent[0])
    with pytest.raises(RuntimeError, match="root rank could not measure.*out of memory"):
        cost.measured(traced, cost.sample_of(traced, 3), device=CPU)


def test_the_automatic_cut_follows_the_measured_costs(monkeypatch):
    costs = dict(zip(["a", "b", "c", "d"], [1.0, 1.0, 1.0, 3.0], strict=True))

    def count(traced, sample, device, repeats):
        return [
            OperationCost(op.name, costs[op.name], 0.0, 3, 4, (5,)) for op in traced.operations
        ]

    monkeypatch.setattr(cost, "measure", count)
    model = tf_mp.parallelize(
        chain(*(keras.layers.Dense(4, name=name) for name in costs)), cuts="auto", stages=2
    )
    assert tf_mp.pipeline_of(model).cut.partition.balance == [3, 1]


def test_num_bytes_counts_the_dtype():
    assert cost.num_bytes(tf.zeros([3, 4], tf.float16)) == 24
    assert cost.num_bytes(tf.zeros([], tf.int64)) == 8
    assert cost.num_bytes(None) == 0


def test_ranks_and_devices_share_the_cores_while_measuring(monkeypatch):
    monkeypatch.setattr(affinity.cores, "share_of_rank", lambda local_size: 8 // local_size)
    assert affinity.cores_of_device("/device:CPU:0", 2) == 4
    assert affinity.cores_of_device("/device:CPU:0", 16) == 1
    assert affinity.cores_of_device("/device:GPU:0", 2) is None


def test_all_threads_keep_to_the_given_cores_and_get_theirs_back():
    tf.linalg.matmul(tf.ones([64, 64]), tf.ones([64, 64]))  # TensorFlow's threads are there
    before = {thread: os.sched_getaffinity(thread) for thread in affinity._threads()}
    started = []
    done = threading.Event()

    def wait():
        started.append(threading.get_native_id())
        done.wait()

    with affinity.limited_to(1):
        assert {len(os.sched_getaffinity(thread)) for thread in affinity._threads()} == {1}
        threading.Thread(target=wait).start()
    try:
        assert {t: os.sched_getaffinity(t) for t in before} == before
        assert os.sched_getaffinity(started[0]) == os.sched_getaffinity(0)
    finally:
        done.set()


def test_a_measurement_runs_on_the_cores_of_one_device(monkeypatch):
    seen = []

    def count(traced, *_):
        seen.append(len(os.sched_getaffinity(0)))
        return [OperationCost(op.name, 1.0, 2.0, 3, 4, (5,)) for op in traced.operations]

    monkeypatch.setattr(cost, "measure", count)
    monkeypatch.setattr(affinity, "cores_of_device", lambda device, num_devices: 3 - num_devices)
    traced = graph.trace(chain(keras.layers.Dense(2)))
    cost.for_partition(traced, 2)
    assert seen == [1]
