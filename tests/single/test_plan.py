"""The plan: bytes against what TensorFlow really allocates, times against tables by hand."""

import contextlib
import gc
import json
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_mp
from tf_mp import compat, cost, forecast, memory, plan, schedule, timing
from tf_mp.cost import OperationCost
from tf_mp.forecast import StageTimes
from tf_mp.pipeline import pipeline_of


def split(model, **arguments):
    return pipeline_of(tf_mp.parallelize(model, **arguments))


def chain(*units, frozen=()):
    inputs = keras.Input((4,))
    x = inputs
    for i, count in enumerate(units):
        x = keras.layers.Dense(count, name=f"dense{i}", trainable=i not in frozen)(x)
    return keras.Model(inputs, x, name="chain")


def costs_of(pipeline, *, forward=1.0, backward=2.0, micro_batch=1):
    """Costs without measuring: weights from the model, outputs from its shapes."""
    seen, rows = set(), []
    for operation in pipeline.graph.operations:
        new = [v for v in operation.variables if v.trainable and id(v) not in seen]
        seen.update(map(id, new))
        sizes = [4 * micro_batch * int(np.prod(shape[1:])) for shape in operation.shapes]
        rows.append(
            OperationCost(
                operation.name, forward, backward, sum(map(cost.num_bytes, new)), 0, tuple(sizes)
            )
        )
    return rows


@pytest.fixture
def unmeasured(monkeypatch):
    """Operations cost 1 + 2 ms and stages what the test puts into the returned list."""
    times = [StageTimes([3, 1], [4, 2], [2, 9], [1])]
    monkeypatch.setattr(
        cost, "measured", lambda traced, *_, **__: costs_of(Traced(traced), micro_batch=2)
    )
    monkeypatch.setattr(forecast, "measure_stages", lambda *_: times[0])
    return times


class Traced:
    """What `costs_of` looks at."""

    def __init__(self, traced):
        self.graph = traced


# --- bytes -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.1), 0),
    "momentum": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1),
    "rmsprop": (lambda: keras.optimizers.RMSprop(), 1),
    "rmsprop all": (lambda: keras.optimizers.RMSprop(momentum=0.9, centered=True), 3),
    "adam": (lambda: keras.optimizers.Adam(), 2),
    "amsgrad": (lambda: keras.optimizers.Adam(amsgrad=True), 3),
    "ema": (lambda: keras.optimizers.SGD(use_ema=True), 1),
    "accumulating": (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), 1),
    "scheduled": (
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10)),
        2,
    ),
    "loss scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slot_bytes_are_exact_for(name):
    make, slots = OPTIMIZERS[name]
    variables = chain(8, 3).trainable_variables
    assert memory.slot_bytes(make(), variables) == slots * sum(map(cost.num_bytes, variables))
    assert memory.slot_bytes(make(), []) == 0


def test_bytes_of_weights_and_slots_are_those_that_tensorflow_holds_on_each_device():
    model = tf_mp.parallelize(chain(64, 32, 16, 8, frozen=(2,)), cuts=[2, 2])
    pipeline = pipeline_of(model)
    model.compile(keras.optimizers.Adam(), loss="mse")
    x = np.ones((4, 4), np.float32)
    model.train_on_batch(x, np.ones((4, 8), np.float32))
    held = {stage.device: 0 for stage in pipeline.stages}
    slots = dict(held)
    for variable in model.variables:
        held["/device:" + compat.raw(variable).device.split("device:")[1]] += cost.num_bytes(
            variable
        )
    shared = {id(model.optimizer.iterations), id(model.optimizer._learning_rate)}
    for variable in model.optimizer.variables:
        if id(variable) not in shared:
            home = "/device:" + compat.raw(variable).device.split("device:")[1]
            slots[home] += cost.num_bytes(variable)
    planned = memory.stage_bytes(pipeline, costs_of(pipeline), model.optimizer, [1, 1])
    assert [kept.weights for kept in planned] == [held[s.device] for s in pipeline.stages]
    assert [kept.slots for kept in planned] == [slots[s.device] for s in pipeline.stages]
    trained = [4 * (5 * 64 + 65 * 32), 4 * (17 * 8)]
    assert [kept.gradients for kept in planned] == trained


def test_a_weight_that_two_stages_use_counts_where_it_lives():
    inputs, shared = keras.Input((4,)), keras.layers.Dense(4, name="shared")
    x = keras.layers.Dense(4, name="between")(shared(inputs))
    pipeline = split(keras.Model(inputs, shared(x)), cuts=["between"])
    first, last = memory.stage_bytes(pipeline, costs_of(pipeline), keras.optimizers.SGD(), [1, 1])
    assert (first.weights, first.gradients) == (80, 80)
    assert (last.weights, last.gradients) == (80, 80)  # of `between` alone


def test_activations_in_flight_are_inputs_and_outputs_of_the_operations():
    pipeline = split(chain(8, 6, 5), cuts=[2, 1])
    costs = costs_of(pipeline, micro_batch=10)
    first, last = memory.stage_bytes(pipeline, costs, keras.optimizers.SGD(), [2, 1])
    assert (first.activations, first.in_flight) == (40 * (8 + 6), 2)
    assert (last.activations, last.in_flight) == (40 * (6 + 5), 1)
    assert first.total == first.weights + first.gradients + 2 * first.activations


def test_recomputation_keeps_only_inputs_in_flight():
    pipeline = split(chain(8, 6, 5, 7), cuts=[2, 2], recompute=True)
    costs = costs_of(pipeline, micro_batch=10)
    first, last = memory.stage_bytes(pipeline, costs, keras.optimizers.SGD(), [2, 1])
    assert (first.activations, first.working) == (0, 40 * (8 + 6))  # the host keeps its input
    assert (last.activations, last.working) == (40 * 6, 40 * (5 + 7))
    assert last.total == last.weights + last.gradients + 40 * 6 + 40 * 12


def test_sent_bytes_count_each_reader():
    inputs = keras.Input((4,))
    a = keras.layers.Dense(8, name="a")(inputs)
    b = keras.layers.Dense(2, name="b")(a)
    c = keras.layers.Concatenate(name="c")([a, b])
    pipeline = split(keras.Model(inputs, c), cuts=[1, 1, 1])
    costs = costs_of(pipeline, micro_batch=10)
    assert [memory.sent_bytes(pipeline, costs, k) // 40 for k in range(3)] == [16, 2, 0]


# --- times -----------------------------------------------------------------------------------


def test_the_predicted_step_is_the_simulated_one(unmeasured):
    pipeline = split(chain(8, 6), cuts=[1, 1], micro_batches=2)
    found = plan.plan(pipeline, 1)  # one sample: one micro-batch
    # As by hand in test_simulate: forward 3, travel 1, 1 and 2, travel 1, 4; updates 2 and 9.
    assert found.step_ms == 16
    assert found.unsplit_ms == 21
    assert found.bubble == pytest.approx(1 - 21 / 32)
    assert found.speedup_bound == pytest.approx(21 / 12)
    assert found.better is None  # two operations can be cut in one way only


def test_the_plan_in_json_has_what_its_readers_need(unmeasured):
    pipeline = split(chain(8, 6), cuts=[1, 1], micro_batches=4)
    found = json.loads(json.dumps(plan.plan(pipeline, 10).to_json()))
    assert list(found) == [
        "model",
        "batch_size",
        "micro_batches",
        "micro_batch_sizes",
        "schedule",
        "step_ms",
        "bubble",
        "speedup_bound",
        "unsplit_ms",
        "stages",
        "devices",
        "actions",
        "better",
    ]
    assert found["micro_batch_sizes"] == [3, 3, 2, 2]
    first, second = found["stages"]
    assert first["operations"] == ["dense0"] and second["operations"] == ["dense1"]
    assert (first["parameters"], second["parameters"]) == (40, 54)
    assert (first["forward_ms"], first["backward_ms"], first["update_ms"]) == (3, 4, 2)
    assert first["bytes"]["weights"] == 160 and first["bytes"]["in_flight"] == 2
    assert first["bytes"]["slots"] == 160  # RMSprop, when nothing is compiled
    assert first["bytes"]["total"] == 3 * 160 + 2 * first["bytes"]["activations"]
    assert [d["device"] for d in found["devices"]] == ["/device:CPU:0", "/device:CPU:1"]
    assert found["devices"][0]["bytes"] == first["bytes"]["total"]
    assert len(found["actions"]) == 16
    assert found["actions"][0] == {
        "stage": 0,
        "micro_batch": 0,
        "kind": "forward",
        "start_ms": 0,
        "end_ms": 3,
    }


def test_the_optimizer_of_a_compiled_model_is_the_one_that_is_planned(unmeasured):
    model = tf_mp.parallelize(chain(8, 6), cuts=[1, 1])
    model.compile(keras.optimizers.Adam(), loss="mse")
    first, _ = plan.plan(pipeline_of(model), 8).stages
    assert first.bytes.slots == 2 * first.bytes.gradients


def test_a_better_balance_is_found_and_its_step_scaled_from_the_measured_one(unmeasured):
    unmeasured[0] = StageTimes([1, 3], [2, 6], [0, 0], [0])
    pipeline = split(chain(4, 4, 4, 4), cuts=[1, 3], micro_batches=4)
    found = plan.plan(pipeline, 8)
    # Operations of 1 + 2 ms each: device 1 with three of them takes 36 + 3, device 0 at most that.
    assert found.better.balance == [2, 2]
    before, after = 4 * 9 + 3, 4 * 6 + 6
    assert found.better.step_ms == pytest.approx(found.step_ms * after / before)
    assert found.better.speedup_bound == pytest.approx(2)


def test_the_best_balance_is_not_called_better_than_itself(unmeasured):
    unmeasured[0] = StageTimes([2, 2], [4, 4], [0, 0], [0])
    assert plan.plan(split(chain(4, 4, 4, 4), cuts=[2, 2]), 8).better is None


def test_a_heavy_update_weighs_in_the_better_balance():
    # Equal operations, but the last weight is large and its update slow: it gets a stage.
    pipeline = split(chain(4, 4, 4, 400), cuts=[2, 2], micro_batches=2)
    table, costs = pipeline.schedule_of(2), costs_of(pipeline)
    light = StageTimes([2, 2], [4, 4], [0, 0], [0])
    heavy = StageTimes([2, 2], [4, 4], [0, 30], [0])
    assert forecast.better_balance(pipeline, costs, table, light) is None
    balance, share, bound = forecast.better_balance(pipeline, costs, table, heavy)
    assert balance == [3, 1] and share < 1 and bound > 1


@pytest.mark.parametrize(("cuts", "shared"), [([1, 1], True), ([2], False)])
def test_a_device_alone_has_the_cores_of_its_rank_and_no_more(monkeypatch, cuts, shared):
    pipeline, limits, given = split(chain(8, 6), cuts=cuts), [], []
    monkeypatch.setattr(cost, "measured", lambda *_, **__: costs_of(pipeline))
    monkeypatch.setattr(plan.affinity.cores, "share_of_rank", lambda local_size: 6)
    monkeypatch.setattr(
        plan.affinity, "limited_to", lambda n: limits.append(n) or contextlib.nullcontext()
    )
    zeros = [0.0] * len(cuts)
    monkeypatch.setattr(
        forecast, "measure_stages",
        lambda *args: given.append(args[-1]) or StageTimes(zeros, zeros, zeros, zeros[1:]),
    )  # fmt: skip
    plan.plan(pipeline, 4)
    assert (limits, given) == ([6], [shared])


def test_stages_are_measured_with_real_tensors_and_masks():
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(8, 4, mask_zero=True)(tokens)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(keras.layers.Dropout(0.5)(x))
    outputs = keras.layers.Dense(2)(keras.layers.BatchNormalization()(x))
    pipeline = split(keras.Model(tokens, outputs), cuts=["mean"])
    before = [v.numpy() for v in pipeline.graph.model.variables]
    sample = cost.sample_of(pipeline.graph, 4)
    times = forecast.measure_stages(
        pipeline, sample, keras.optimizers.Adam(), repeats=1, shared=True
    )
    crowded = [times.forward_ms, times.backward_ms, times.update_ms, times.accumulate_ms]
    assert [len(entry) for entry in crowded] == [2] * 4 and len(times.transfer_ms) == 1
    for beside, alone in zip(crowded, times.alone_ms, strict=True):
        assert all(0 <= b <= a for a, b in zip(beside, alone, strict=True))
    assert times.lead_in_ms > 0
    assert all(time > 0 for time in times.update_ms)
    for old, variable in zip(before, pipeline.graph.model.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy(), err_msg=variable.path)


def test_a_forward_that_is_redone_counts_in_the_backward(monkeypatch):
    monkeypatch.setattr(
        timing, "time_functions", lambda runs, repeats, pick=min: [1.0, 3.0, 8.0][: len(runs)]
    )
    for again, backward_ms in ((False, 5), (True, 7)):
        pipeline = split(chain(8, 6), cuts=[1, 1], recompute=again)
        sample = cost.sample_of(pipeline.graph, 2)
        times = forecast.measure_stages(pipeline, sample, keras.optimizers.SGD(), repeats=1)
        assert times.forward_ms == [2, 2]
        assert times.backward_ms == [backward_ms] * 2
        assert times.accumulate_ms == [2, 2]
        assert times.lead_in_ms == 1 + 1  # the calls
        assert times.alone_ms is None


def test_other_devices_work_while_a_stage_is_timed(monkeypatch):
    pipeline = split(chain(8, 6, 4), cuts=[1, 1, 1], devices=[0, 1, 0], stages=3)
    seen = []

    @contextlib.contextmanager
    def at_work(loads):
        for load in loads:
            load()
        seen.append(len(loads))
        yield
        seen.append("end")

    def times_of(runs, repeats, pick=min):
        inside = seen and seen[-1] != "end"
        return [1.0, 3.0, 8.0][: len(runs)] if not inside else [2.0, 5.0, 16.0][: len(runs)]

    monkeypatch.setattr(forecast.company, "at_work", at_work)
    monkeypatch.setattr(timing, "time_functions", times_of)
    sample = cost.sample_of(pipeline.graph, 2)
    times = forecast.measure_stages(pipeline, sample, keras.optimizers.SGD(), 1, True)
    assert seen == [1, "end"] * 3
    assert times.forward_ms == [3] * 3 and times.backward_ms == [11] * 3
    assert times.alone_ms == [[2] * 3, [5] * 3, [1] * 3, [2] * 3]
    assert times.lead_in_ms == 3


def test_all_but_the_first_backward_accumulate():
    table = schedule.build("gpipe", 2, 4)
    times = StageTimes([1, 1], [2, 2], [0, 0], [0], None, [4, 0])
    run = forecast.predict(table, times)
    assert run.busy_ms == (4 * 1 + 4 * 2 + 3 * 4, 4 * 3)
    later = forecast.predict(table, times._replace(lead_in_ms=5.0))
    assert later.step_ms == run.step_ms + 5


def test_timing_an_update_leaves_variables_and_optimizer_alone():
    model = chain(8, 6)
    model.compile(keras.optimizers.Adam(0.5), loss="mse")
    before = [v.numpy() for v in model.variables]
    timing.update_function(model.optimizer, model.trainable_variables, "/device:CPU:1")()
    assert not model.optimizer.built
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


def test_what_an_update_was_timed_with_is_given_back():
    variables = [keras.Variable(np.zeros((4, 4), np.float32))]
    optimizer = keras.optimizers.Adam()
    update = timing.update_function(optimizer, variables, "/device:CPU:0")
    update()
    graph = weakref.ref(update.get_concrete_function().graph)
    assert graph() is not None
    del update
    gc.collect()
    assert graph() is None


def test_a_plain_copy_has_the_settings_and_neither_wrapper_nor_state():
    inner = keras.optimizers.Adam(0.25, beta_1=0.5)
    inner.build([keras.Variable(tf.zeros([2]))])
    copy = timing.plain_copy(keras.optimizers.LossScaleOptimizer(inner))
    assert type(copy) is keras.optimizers.Adam
    assert copy.get_config()["beta_1"] == 0.5 and not copy.built


def test_nothing_travels_on_one_device():
    assert timing.time_transfer("/device:CPU:0", "/device:CPU:0") == 0
    assert timing.time_transfer("/device:CPU:0", "/device:CPU:1", 1) >= 0


def test_a_balance_within_the_noise_is_not_called_better():
    assert plan._better(([1, 1], 0.99, 1.5), 10.0) is None
    assert plan._better(([1, 1], 0.5, 1.5), 10.0) == plan.Better([1, 1], 5.0, 1.5)
    assert plan._better(None, 10.0) is None
