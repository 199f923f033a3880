"""Tables fit 80 columns and have no colour in a file; pictures need no colour to be read."""

import collections
import io
import itertools

import matplotlib.image
import numpy as np
import pytest

from tf_mp import doctor, pictures, placement, plan, report, runs, schedule, simulate
from tf_mp.memory import StageBytes
from tf_mp.spans import Span, Step
from tf_mp.timeline import Timeline

DEVICES = ("/device:CPU:0", "/device:CPU:1")


def made_proof(*, strays=0):
    here, there = DEVICES
    counts = collections.Counter(
        {(0, "forward", "Conv2D", here): 4, (1, "forward", "MatMul", there): 4 - strays}
    )
    counts[0, "backward", "Conv2DBackpropInput", here] = 2
    counts[1, "optimizer", "Mul", there] = 16
    if strays:
        counts[1, "forward", "MatMul", here] = strays
    name = "StatefulPartitionedCall/stage_1/forward_0/a_long_name_of_a_layer/" * 2
    lost = tuple(placement.Stray(f"{name}{i}", there, here, "dense") for i in range(strays))
    transfers = (
        placement.Crossing("stage_0/forward_0/x", here, there, 200_704, "activation"),
        placement.Crossing("stage_0/forward_1/x", here, there, None, "activation"),
        placement.Crossing("ctrl", here, there, 0, "control"),
    )
    return placement.Proof(
        DEVICES, (("conv1", "conv2"), ("dense",)), counts, lost, transfers,
        collections.Counter({"scalars": 3}), (), runs.Run((), ()),
    )  # fmt: skip


def made_plan():
    table = schedule.build("1f1b", 2, 4)
    stages = tuple(
        plan.StagePlan(
            k,
            DEVICES[k],
            ("a", "b"),
            1_000_000,
            2.0,
            4.0,
            1.0,
            StageBytes(1, 2, 3, 4, 5),
            7,
            False,
        )
        for k in range(2)
    )
    ran = simulate.simulate(table, [2.0, 2.0], backward_ms=[4.0, 4.0], update_ms=[1.0, 1.0])
    return plan.Plan(
        "net", 8, (2, 2, 2, 2), table, stages, DEVICES, ran, plan.Better([3, 1], 20.0, 1.9)
    )


def made_timeline(planned):
    spans = [
        Span(a.stage, a.kind, a.micro_batch, DEVICES[a.stage], start, planned.end_ms[a], 2.0)
        for a, start in planned.start_ms.items()
    ]
    busy = {
        device: sorted((s.start_ms, s.end_ms) for s in spans if s.device == device)
        for device in DEVICES
    }
    step = Step(planned.step_ms, tuple(spans), busy, [(0.0, 1.0)])
    return Timeline(DEVICES, schedule.build("1f1b", 2, 4), (step,))


def printed(function, *arguments, **named):
    file = io.StringIO()
    function(*arguments, report.console(file), **named)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    return text


def test_a_proof_says_how_many_operations_of_how_many_ran_in_their_place():
    text = printed(report.proof_tables, made_proof(), title="net")
    assert "OK: every operation" in text
    assert "convolution" in text and "4 of 4" in text
    assert "196 KiB + ?" in text
    assert "conv1 .. conv2" in text
    assert "control" not in text


def test_strays_are_listed_with_their_layer_up_to_a_number():
    text = printed(report.proof_tables, made_proof(strays=3))
    assert "NOT OK: 3 strays" in text
    assert "1 of 4" in text
    assert "dense" in text and "CPU:1" in text
    file = io.StringIO()
    many = made_proof(strays=3)
    many = placement.dataclasses.replace(many, strays=many.strays * 10)
    report.proof_tables(many, report.console(file))
    assert "and 10 more" in file.getvalue()


def test_checks_that_fail_say_what_to_do():
    checks = [
        doctor.Check("disk", False, "3 MiB", "500 MiB", "Free some [space]"),
        doctor.Check("shm", False, "none", "256 MiB", "docker run", required=False),
    ]
    text = printed(report.check_table, checks)
    rows = [line.split()[:2] for line in text.splitlines()]
    assert ["WRONG", "disk"] in rows and ["note", "shm"] in rows
    assert "disk: Free some [space]" in text
    assert "1 to mend, 1 to know" in text
    assert "All as wanted" in printed(report.check_table, [doctor.Check("a", True, "b", "c")])


def test_a_plan_shows_times_bytes_the_grid_and_a_better_balance():
    text = printed(report.plan_tables, made_plan())
    assert "1,000,000" in text and "cuts=[3, 1]" in text
    rows = [line for line in text.splitlines() if line.startswith("/device") and "F0" in line]
    assert [row.split()[0] for row in rows] == list(DEVICES)
    order = [cell for cell in rows[1].replace(".", " ").split()[1]]
    assert "".join(order).startswith("F0")


def test_the_grid_has_every_action_once_in_the_schedules_order():
    made = made_plan()
    lines = report.schedule_grid(made).splitlines()
    for row, line in zip(made.schedule.by_device, lines, strict=False):
        at = [line.find(f"{a.kind[0].upper()}{a.micro_batch}") for a in row]
        assert -1 not in at
        assert all(a < b for a, b in itertools.pairwise(at))


def test_a_timeline_says_how_far_the_prediction_was_off():
    planned = made_plan().simulation
    text = printed(report.timeline_tables, made_timeline(planned), planned)
    assert "(+0%)" in text
    assert "The order of actions is the schedule's." in text
    assert "of the reduction over ranks was hidden" in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes_are_short(num_bytes, text):
    assert report.size(num_bytes) == text


def drawings():
    planned = made_plan().simulation
    return {
        "placement": lambda file: pictures.draw_placement(
            [("the usual idiom", made_proof(strays=2)), ("tf_mp", made_proof())], file
        ),
        "plan": lambda file: pictures.draw_plan(made_plan(), file),
        "timeline": lambda file: pictures.draw_timeline(made_timeline(planned), planned, file),
        "measured only": lambda file: pictures.draw_timeline(made_timeline(planned), None, file),
    }


@pytest.mark.parametrize("name", ["placement", "plan", "timeline", "measured only"])
def test_pictures_are_drawn_in_black_and_white(tmp_path, name):
    file = tmp_path / "picture.png"
    drawings()[name](file)
    pixels = matplotlib.image.imread(file)[..., :3]
    assert np.ptp(pixels, axis=-1).max() < 0.02  # no colour carries a meaning
    assert pixels.shape[1] > 900
    assert 0.02 < (pixels.mean(axis=-1) < 0.5).mean() < 0.5
