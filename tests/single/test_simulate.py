"""Simulated schedules against published formulas and tables computed by hand."""

import pytest

from tf_mp.schedule import Action, build
from tf_mp.simulate import (
    bubble_fraction,
    bubble_over_ideal,
    pipeline_ms,
    simulate,
    speedup_bound,
)

SHAPES = [(n, m) for n in range(1, 6) for m in (1, 2, 3, 4, 8, 16)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("backward", [1.0, 2.5])
def test_bubble_equals_the_published_formulas_for_equal_stages(name, backward):
    for n, m in SHAPES:
        run = simulate(build(name, n, m), [1.0] * n, backward_ms=[backward] * n)
        assert run.bubble == pytest.approx((n - 1) / (m + n - 1))
        assert run.bubble == pytest.approx(bubble_fraction(n, m))
        ideal = m * (1 + backward)
        assert (run.step_ms - ideal) / ideal == pytest.approx(bubble_over_ideal(n, m))
        assert run.step_ms == pytest.approx(pipeline_ms([1 + backward] * n, m))
        assert run.utilisation == pytest.approx([m / (m + n - 1)] * n)


def test_published_examples():
    assert bubble_fraction(4, 4) == pytest.approx(3 / 7)
    assert bubble_over_ideal(4, 8) == pytest.approx(3 / 8)
    assert bubble_fraction(1, 1) == 0


def laid_out(run, stage):
    """`{"f0": (start, end), "b0": ...}` of one stage."""
    return {
        f"{a.kind[0]}{a.micro_batch}": (run.start_ms[a], run.end_ms[a])
        for a in run.start_ms
        if a.stage == stage
    }


def test_1f1b_with_a_slow_first_stage_by_hand():
    # forward 3 and 1, backward 4 and 2: device 1 waits for device 0 after each micro-batch.
    run = simulate(build("1f1b", 2, 3), [3, 1], backward_ms=[4, 2])
    assert laid_out(run, 0) == {
        "f0": (0, 3),
        "f1": (3, 6),
        "b0": (6, 10),
        "f2": (10, 13),
        "b1": (13, 17),
        "b2": (17, 21),
    }
    assert laid_out(run, 1) == {
        "f0": (3, 4),
        "b0": (4, 6),
        "f1": (6, 7),
        "b1": (7, 9),
        "f2": (13, 14),
        "b2": (14, 16),
    }
    assert run.step_ms == 21
    assert run.busy_ms == (21, 9)
    assert run.utilisation == pytest.approx((1, 9 / 21))
    assert run.bubble == pytest.approx(1 - 30 / 42)
    assert run.in_flight_max == (2, 1)


def test_gpipe_with_a_slow_last_stage_by_hand():
    # forward 1 and 2, backward 2 and 3.
    run = simulate(build("gpipe", 2, 2), [1, 2], backward_ms=[2, 3])
    assert laid_out(run, 0) == {"f0": (0, 1), "f1": (1, 2), "b0": (8, 10), "b1": (11, 13)}
    assert laid_out(run, 1) == {"f0": (1, 3), "f1": (3, 5), "b0": (5, 8), "b1": (8, 11)}
    assert run.step_ms == 13
    assert run.bubble == pytest.approx(1 - (6 + 10) / 26)


def test_update_and_transfer_by_hand():
    # One micro-batch: 0 to 3, travel 1, 4 to 5, back 5 to 7, travel 1, 8 to 12; then the update.
    run = simulate(
        build("1f1b", 2, 1), [3, 1], backward_ms=[4, 2], update_ms=[2, 9], transfer_ms=[1]
    )
    assert laid_out(run, 0) == {"f0": (0, 3), "b0": (8, 12)}
    assert laid_out(run, 1) == {"f0": (4, 5), "b0": (5, 7)}
    assert run.step_ms == 16  # device 1 updates until 16, device 0 until 14
    assert run.busy_ms == (9, 12)


def test_what_the_host_does_first_makes_all_later():
    table, times = build("1f1b", 2, 2), {"backward_ms": [2, 3], "update_ms": [1, 1]}
    at_once = simulate(table, [1, 2], **times)
    later = simulate(table, [1, 2], lead_in_ms=4, **times)
    assert later.step_ms == at_once.step_ms + 4
    assert later.start_ms == {action: ms + 4 for action, ms in at_once.start_ms.items()}
    assert later.end_ms == {action: ms + 4 for action, ms in at_once.end_ms.items()}
    assert later.busy_ms == at_once.busy_ms


def test_nothing_travels_between_two_stages_of_one_device():
    together = build("1f1b", 2, 2, stage_devices=[0, 0])
    run = simulate(together, [1, 1], backward_ms=[1, 1], transfer_ms=[100], update_ms=[1, 2])
    assert run.step_ms == 8 + 3
    assert run.bubble == 0


def test_devices_without_a_stage_do_not_count():
    run = simulate(build("gpipe", 1, 2, stage_devices=[3]), [1], backward_ms=[1])
    assert run.busy_ms == (4,) and run.bubble == 0


def test_a_pipeline_is_never_faster_than_its_slowest_stage():
    for name in ("gpipe", "1f1b"):
        run = simulate(build(name, 3, 4), [1, 5, 2], backward_ms=[2, 6, 1])
        assert run.step_ms >= 4 * 11
        assert run.end_ms[Action(0, 3, "backward")] == run.step_ms


def test_pipeline_ms_is_the_sum_then_the_slowest_then_the_update():
    assert pipeline_ms([7, 3], 3) == 10 + 2 * 7
    assert pipeline_ms([7, 3], 1, update_ms=[1, 2]) == 12


def test_speedup_bound_of_the_seed_network_is_its_heavier_stage():
    assert speedup_bound([76, 24]) == pytest.approx(1 / 0.76)
    assert speedup_bound([5, 5, 5]) == 3
    assert speedup_bound([0, 0]) == 2  # nothing measured: the number of devices


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"backward_ms": [1]}, r"backward_ms=\[1.0\]. Expected: 2 times"),
        ({"backward_ms": [1, -1]}, "backward_ms="),
        ({"backward_ms": [1, float("nan")]}, "backward_ms="),
        ({"backward_ms": [1, 1], "transfer_ms": [1, 1]}, "transfer_ms=.*Expected: 1 times"),
        ({"backward_ms": [1, 1], "update_ms": [1]}, "update_ms="),
    ],
)
def test_wrong_times_are_named(times, message):
    with pytest.raises(ValueError, match=message):
        simulate(build("gpipe", 2, 2), [1, 1], **times)


def test_a_device_is_quicker_while_the_others_wait():
    # Alone everything takes half. Forward 0, forward 1, backward 1: one device at a time. Then
    # backward 0 (8 or 4 ms) beside the update of stage 1 (2 or 1 ms), and the update of stage 0.
    times = {"backward_ms": [8, 4], "update_ms": [2, 2]}
    table = build("gpipe", 2, 1)
    apart = simulate(table, [4, 2], alone_ms=[[2, 1], [4, 2], [1, 1]], **times)
    assert apart.end_ms[Action(1, 0, "backward")] == 2 + 1 + 2
    # The update takes 2 ms, all of it beside the backward; x ms of backward have 2 of them beside:
    # x = 4 + 4 * 2 / x, so x = 2 + 12 ** 0.5.
    assert apart.end_ms[Action(0, 0, "backward")] == pytest.approx(5 + 2 + 12**0.5, rel=0.01)
    assert apart.step_ms == pytest.approx(5 + 2 + 12**0.5 + 1, rel=0.01)
    together = simulate(table, [4, 2], **times)
    assert together.step_ms == 4 + 2 + 4 + 8 + 2


def test_one_device_is_always_alone_and_equal_times_change_nothing():
    one = simulate(build("1f1b", 1, 3), [2], backward_ms=[4], alone_ms=[[1], [2], [0]])
    assert one.step_ms == 9
    same = {"backward_ms": [2, 6, 1], "update_ms": [1, 2, 3]}
    table = build("1f1b", 3, 4)
    alone = [[1, 5, 2], *same.values()]
    assert simulate(table, [1, 5, 2], alone_ms=alone, **same) == simulate(table, [1, 5, 2], **same)
