"""A timeline shows what ran, in the plan's order, and its sums agree with the step time."""

import json

import keras
import numpy as np
import pytest

import tf_mp
from tf_mp import (
    models,
    pipeline,
    request,
    runs,
    schedule,
    simulate,
    spans,
    timeline,
    trace,
    xplane,
)
from tf_mp.spans import Span, Step
from tf_mp.table import Action
from tf_mp.timeline import Timeline

DEVICES = ("/device:CPU:0", "/device:CPU:1")
STAGES, MICRO_BATCHES = 2, 4


def made(spans_=(), step_ms=10.0, **named):
    table = schedule.build("1f1b", STAGES, MICRO_BATCHES)
    return Timeline(DEVICES, table, (Step(step_ms, tuple(spans_), {}, []),), **named)


def as_planned():
    table = schedule.build("1f1b", STAGES, MICRO_BATCHES)
    planned = simulate.simulate(table, [1.0, 2.0], backward_ms=[2.0, 3.0])
    return planned, [
        Span(a.stage, a.kind, a.micro_batch, DEVICES[a.stage], start, planned.end_ms[a], 1.0)
        for a, start in planned.start_ms.items()
    ]


@pytest.fixture(scope="module")
def measured():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(512, activation="relu", name=f"dense{i}") for i in range(6)]
    net = keras.Sequential([keras.Input((256,)), *layers])
    model = tf_mp.parallelize(net, cuts=[3, 3], micro_batches=MICRO_BATCHES)
    model.compile("sgd", "mse")
    x = np.ones((256, 256), np.float32)
    before = [v.numpy() for v in model.variables]
    found = timeline.measure(model, (x, np.ones((256, 512), np.float32)), steps=3, warm_up=1)
    assert all((a == v.numpy()).all() for a, v in zip(before, model.variables, strict=True))
    return found, pipeline.pipeline_of(model)


def test_every_action_of_the_schedule_is_seen_in_every_step(measured):
    found, _ = measured
    expected = {action for row in found.schedule.by_device for action in row}
    assert len(found.steps) == 3
    for step in found.steps:
        assert {span.action for span in step.spans} - {None} == expected
        assert {span.device for span in step.spans} == set(DEVICES)
        assert "optimizer" in {span.name for span in step.spans}


def test_the_schedule_is_obeyed(measured):
    found, plan = measured
    assert found.disorder() == []
    table = plan.schedule_of(MICRO_BATCHES)
    assert found.in_flight_max() == [table.in_flight_max(k) for k in range(STAGES)]


def test_utilisation_agrees_with_the_actions_and_the_step_time(measured):
    found, _ = measured
    ratios = []
    for step in found.steps:
        assert max(span.end_ms for span in step.spans) <= step.step_ms
        for device in DEVICES:
            shares = [span.busy_ms for span in step.spans if span.device == device]
            worked = step.utilisation(device) * step.step_ms
            assert max(shares) <= worked <= min(sum(shares), step.step_ms) * 1.0001
            ratios.append(worked / sum(shares))
    # What little runs beside an action (labels, say) is counted once in the device's time.
    assert np.median(ratios) > 0.8
    assert found.bubble == pytest.approx(1 - np.mean(list(found.utilisation().values())))


def test_the_step_time_is_the_clocks_where_it_is_known(measured):
    assert made(step_ms=10.0).step_ms == 10
    known = made(step_ms=10.0, clock_ms=8.0)
    assert (known.step_ms, known.profiled_ms) == (8, 10)
    assert (known.to_json()["step_ms"], known.to_json()["profiled_step_ms"]) == (8, 10)
    found, _ = measured
    assert found.step_ms == found.clock_ms > 0


def test_loops_take_their_turn():
    net = models.lstm(width=64, length=16)
    model = tf_mp.parallelize(net, cuts=[3, 3], micro_batches=MICRO_BATCHES)
    request.compile_if_needed(model)
    found = timeline.measure(model, request.random_batch(model, 32), steps=3, warm_up=1)
    assert found.disorder() == []


def test_an_action_that_begins_too_early_is_named():
    planned, laid = as_planned()
    assert made(laid).disorder() == []
    late = next(s for s in laid if s.action == Action(0, 1, "backward"))
    moved = [
        s if s is not late else Span(0, "backward", 1, DEVICES[0], 0.0, 1.0, 1.0) for s in laid
    ]
    assert "stage_0/backward_1 began" in made(moved).disorder()[0]


def test_micro_batches_in_flight_are_counted_from_what_ran():
    _, laid = as_planned()
    assert made(laid).in_flight_max() == [2, 1]
    forwards_first = [
        Span(s.stage, s.name, s.micro_batch, s.device, s.start_ms, s.end_ms, 1.0)
        if s.name == "forward"
        else Span(s.stage, s.name, s.micro_batch, s.device, 100.0, 101.0 + s.micro_batch, 1.0)
        for s in laid
    ]
    assert made(forwards_first).in_flight_max() == [4, 4]


def test_overlapping_times_are_counted_once():
    assert spans.union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert spans.total([(0, 2), (1, 3), (5, 6)]) == 4


def test_the_hidden_share_of_communication_is_what_lies_under_work():
    step = Step(10.0, (), {DEVICES[0]: [(0.0, 4.0)]}, [(3.0, 5.0)])
    assert step.overlapped == pytest.approx(0.5)
    assert Step(10.0, (), {}, []).overlapped is None


# Events made by hand -------------------------------------------------------------------------

RUN = runs.Run(
    (
        runs.Op(0, "stage_0/forward_0/mul", "MatMul", DEVICES[0], elements=99, num_bytes=396),
        runs.Op(1, "stage_0/reduce/h", "HorovodAllreduce", DEVICES[0], (0,), elements=99),
        runs.Op(2, "stage_0/backward_0/mul", "MatMul", DEVICES[0], (0,), elements=99),
    ),
    (),
)


def event(name, start_ms, end_ms, plane="/host:CPU", /, **stats):
    return xplane.ProfilerEvent(plane, name, start_ms * 1e6, end_ms * 1e6, stats)


def test_events_become_spans_of_their_step():
    events = [
        event("tf_mp_step", 100, 110),
        event("tf_mp_step", 120, 130),
        event("stage_0/forward_0/mul:MatMul", 101, 103),
        event("stage_0/forward_0/mul:MatMul", 121, 124),
        event("stage_0/forward_0/mul:MatMul", 115, 116),  # between steps
        event("something else", 101, 109),
    ]
    [first, second], device_times = spans.read_steps(events, RUN)
    assert device_times
    assert [(s.start_ms, s.end_ms) for s in first.spans + second.spans] == [(1, 3), (1, 4)]
    assert first.utilisation(DEVICES[0]) == pytest.approx(0.2)


def test_a_reduction_lasts_until_it_is_done_and_is_not_work():
    about = {"name": "stage_0/reduce/h", "kernel_type": "HorovodAllreduce", "step_id": 7}
    events = [
        event("tf_mp_step", 0, 10),
        event("ExecutorState::ProcessAsync::Done", 6, 6.5, **about),
        event("ExecutorState::ProcessAsync::Start", 2, 2.1, **about),
        event("ExecutorState::ProcessAsync::Done", 8, 9, **about),  # of none that started
    ]
    [step], _ = spans.read_steps(events, RUN)
    assert step.communication == [(2, 6.5)]
    assert step.spans == ()


def on_gpu():
    ops = tuple(
        runs.Op(op.index, op.name, op.type, "/device:GPU:0", op.inputs, elements=99)
        for op in RUN.ops
    )
    return runs.Run(ops, ())


def test_on_a_gpu_the_devices_own_times_count():
    host = [event("tf_mp_step", 0, 10), event("stage_0/forward_0/mul:MatMul", 1, 1.1)]
    kernel = event("gemm", 4, 7, "/device:GPU:0", tf_op="stage_0/forward_0/mul:MatMul")
    [step], device_times = spans.read_steps([*host, kernel], on_gpu())
    assert device_times
    assert [(s.start_ms, s.end_ms) for s in step.spans] == [(4, 7)]
    assert not spans.read_steps(host, on_gpu())[1]


# Traces --------------------------------------------------------------------------------------


def test_the_trace_holds_planned_and_measured_actions_and_horovods(tmp_path, monkeypatch):
    planned, laid = as_planned()
    horovod = tmp_path / "horovod.json"
    horovod.write_text('[\n{"name": "ALLREDUCE", "ph": "B", "ts": 1, "pid": 7},\n')
    monkeypatch.setenv("HOROVOD_TIMELINE", str(horovod))
    trace.write(made(laid), planned, tmp_path / "t.json", rank=1)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(rows.values()) == sorted(
        f"{d} {w}" for d in DEVICES for w in ("measured", "planned")
    )
    actions = [e for e in events if e["ph"] == "X"]
    assert len(actions) == 2 * len(laid)
    assert {e["pid"] for e in actions} == {1}
    assert {"ALLREDUCE"} == {e["name"] for e in events if str(e["pid"]).startswith("Horovod")}


def test_json_has_planned_and_measured_times_of_every_action():
    planned, laid = as_planned()
    found = made([*laid, Span(0, "optimizer", None, DEVICES[0], 9.0, 9.5, 0.5)]).to_json(planned)
    assert {"step_ms", "utilisation", "bubble", "in_flight_max", "actions"} <= set(found)
    *actions, update = found["actions"]
    assert all(a["planned_start_ms"] == a["measured_start_ms"] for a in actions)
    assert update["planned_start_ms"] is None
    json.dumps(found)
