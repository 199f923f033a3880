"""The schedules as tables, written out; and each check seen to fail."""

import pytest

from tf_mp.schedule import Action, Schedule, build, check, names, needs, register

SHAPES = [(n, m) for n in range(1, 6) for m in range(1, 9)]


def drawn(schedule, **ticks):
    """One row a device: `2` is the forward of micro-batch 2, `[2]` its backward, `.` a wait."""
    shown = {"forward": "{}", "backward": "[{}]"}
    return [
        " ".join("." if a is None else shown[a.kind].format(a.micro_batch) for a in row)
        for row in schedule.grid(**ticks)
    ]


def test_names_are_listed():
    assert names() == ("1f1b", "gpipe")


def test_gpipe_runs_all_forwards_then_all_backwards():
    assert drawn(build("gpipe", 3, 4)) == [
        "0 1 2 3 . . . . [0] [1] [2] [3]",
        ". 0 1 2 3 . . [0] [1] [2] [3] .",
        ". . 0 1 2 3 [0] [1] [2] [3] . .",
    ]


def test_1f1b_alternates_forwards_and_backwards():
    assert drawn(build("1f1b", 3, 4)) == [
        "0 1 2 . . [0] 3 [1] . [2] . [3]",
        ". 0 1 . [0] 2 [1] 3 [2] . [3] .",
        ". . 0 [0] 1 [1] 2 [2] 3 [3] . .",
    ]


def test_1f1b_with_fewer_micro_batches_than_stages():
    assert drawn(build("1f1b", 3, 2)) == [
        "0 1 . . . [0] . [1]",
        ". 0 1 . [0] . [1] .",
        ". . 0 [0] 1 [1] . .",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_of_one_micro_batch_is_a_plain_step(name):
    assert drawn(build(name, 1, 1)) == ["0 [0]"]


def test_two_stages_on_each_of_two_devices():
    schedule = build("1f1b", 4, 2, stage_devices=[0, 1, 0, 1])
    cells = [[str(a or ".").replace("stage_", "") for a in row] for row in schedule.grid()]
    cells = [
        [cell.replace("/forward_", "f").replace("/backward_", "b") for cell in row]
        for row in cells
    ]
    assert [" ".join(row) for row in cells] == [
        "0f0 0f1 2f0 2f1 . 2b0 . 0b0 2b1 . 0b1",
        ". 1f0 1f1 3f0 3b0 3f1 1b0 3b1 . 1b1 .",
    ]
    assert schedule.stage_devices == (0, 1, 0, 1)


def test_grid_draws_a_backward_that_takes_two_ticks():
    assert drawn(build("1f1b", 2, 2), backward_ticks=2) == [
        "0 1 . . [0] [0] . [1] [1]",
        ". 0 [0] [0] 1 [1] [1] . .",
    ]


def test_grid_draws_unequal_stages():
    assert drawn(build("gpipe", 2, 2), forward_ticks=[1, 2], backward_ticks=[1, 3]) == [
        "0 1 . . . . . . [0] . . [1]",
        ". 0 0 1 1 [0] [0] [0] [1] [1] [1] .",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_devices", [1, 2, 5])
def test_total_order_keeps_dependencies_and_the_order_of_each_device(name, num_devices):
    for num_stages, num_micro_batches in SHAPES:
        devices = [k % num_devices for k in range(num_stages)]
        schedule = build(name, num_stages, num_micro_batches, stage_devices=devices)
        order = schedule.total_order()
        assert len(order) == len(set(order)) == 2 * num_stages * num_micro_batches
        place = {action: i for i, action in enumerate(order)}
        assert all(place[need] < place[a] for a in order for need in needs(a, num_stages))
        for row in schedule.by_device:
            assert [place[a] for a in row] == sorted(place[a] for a in row)
        # Skip connections: every earlier stage has the micro-batch behind it.
        assert all(
            place[Action(j, i, "forward")] < place[Action(k, i, "forward")]
            for i in range(num_micro_batches)
            for k in range(num_stages)
            for j in range(k)
        )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gradients_are_summed_in_one_order_under_every_schedule(name):
    for num_stages, num_micro_batches in SHAPES:
        order = build(name, num_stages, num_micro_batches).total_order()
        for stage in range(num_stages):
            backwards = [a.micro_batch for a in order if a.stage == stage and a.kind == "backward"]
            assert backwards == list(range(num_micro_batches))


@pytest.mark.parametrize("num_devices", [2, 5])
def test_memory_in_flight_is_what_each_schedule_promises(num_devices):
    for n, m in SHAPES:
        devices = [k % num_devices for k in range(n)]
        gpipe = build("gpipe", n, m, stage_devices=devices)
        assert [gpipe.in_flight_max(k) for k in range(n)] == [m] * n
        one = build("1f1b", n, m, stage_devices=devices)
        assert [one.in_flight_max(k) for k in range(n)] == [min(m, n - k) for k in range(n)]


def table(text, name="gpipe", num_stages=2, num_micro_batches=1):
    """`table("0f0 0b0 / 1f0 1b0")`: devices apart by a slash, `0f1` = stage 0, micro-batch 1."""
    kinds = {"f": "forward", "b": "backward"}
    rows = [
        [Action(int(c[0]), int(c[2]), kinds[c[1]]) for c in r.split()] for r in text.split("/")
    ]
    return Schedule(name, num_stages, num_micro_batches, tuple(map(tuple, rows)))


def test_check_accepts_a_right_table():
    check(table("0f0 0b0 / 1f0 1b0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0f0 0b0 / 1f0", "misses: stage_1/backward_0"),
        ("0f0 0f0 0b0 / 1f0 1b0", "repeats: stage_0/forward_0"),
        ("0f0 0b0 / 1f0 1b0 1b1", "has unknown: stage_1/backward_1"),
        ("0f0 / 1f0 1b0 0b0", r"puts stage 0 on devices \[0, 1\]"),
        ("0b0 0f0 / 1f0 1b0", "deadlocks: stage_0/backward_0 waits for stage_0/forward_0"),
        ("0f0 0b0 / 1b0 1f0", "stage_1/backward_0 waits for stage_1/forward_0"),
    ],
)
def test_check_names_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        check(table(text))


def test_check_finds_a_cycle_between_two_devices():
    crossed = table("0f0 0b1 0f1 0b0 / 1f0 1b0 1f1 1b1", num_micro_batches=2)
    with pytest.raises(ValueError, match="deadlocks: stage_0/backward_1 waits for stage_0/forw"):
        check(crossed)


def test_check_holds_the_memory_bound():
    gpipe = build("gpipe", 2, 4)
    with pytest.raises(ValueError, match="4 micro-batches in flight in stage 0.*at most 2"):
        check(Schedule("1f1b", 2, 4, gpipe.by_device))


def test_another_schedule_can_join():
    def in_turn(num_stages, num_micro_batches, stage_devices):
        rows = [[] for _ in range(max(stage_devices) + 1)]
        for i in range(num_micro_batches):
            for kind in ("forward", "backward"):
                for stage, device in enumerate(stage_devices):
                    rows[device].append(Action(stage, i, kind))
        return tuple(map(tuple, rows))

    from tf_mp import schedule as module

    register("one_at_a_time", in_turn, in_flight=lambda stage, n, m: 1)
    try:
        assert drawn(build("one_at_a_time", 2, 2)) == [
            "0 . . [0] 1 . . [1]",
            ". 0 [0] . . 1 [1] .",
        ]
        with pytest.raises(ValueError, match="already a schedule"):
            register("one_at_a_time", in_turn, in_flight=lambda stage, n, m: 1)
    finally:
        del module._RULES["one_at_a_time"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1F1B", 2, 2), r"schedule='1F1B'\. Expected one of: '1f1b', 'gpipe'\."),
        (("gpip", 2, 2), "Did you mean 'gpipe'"),
        ((None, 2, 2), "schedule=None"),
        (("gpipe", 0, 2), "stages=0"),
        (("gpipe", 2, 0), "micro_batches=0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)


@pytest.mark.parametrize("devices", [[0], [0, 1, 2], [0, -1]])
def test_stage_devices_must_fit_the_stages(devices):
    with pytest.raises(ValueError, match="stage_devices="):
        build("gpipe", 2, 2, stage_devices=devices)


@pytest.mark.parametrize("ticks", [0, 1.5, [1], [1, 2, 3]])
def test_grid_takes_whole_ticks_only(ticks):
    with pytest.raises(ValueError, match="whole ticks"):
        build("gpipe", 2, 2).grid(forward_ticks=ticks)
