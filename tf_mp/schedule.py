"""The schedule: which action runs after which on each device, as plain data.

An *action* is the forward or the backward of one micro-batch in one stage. A schedule lists, for
each device, the order of its actions; what a device waits for follows from the data:

    F(k, i) needs F(k-1, i)                  n stages (k), m micro-batches (i)
    B(k, i) needs F(k, i) and B(k+1, i)

A skip connection needs nothing more: F(k, i) comes after F(j, i) for every j < k, by the chain.
For n = 3 and m = 4, unit times, one row a device (forward as a figure, backward in brackets):

    gpipe   0   1   2   3   .   .   .   .  [0] [1] [2] [3]
            .   0   1   2   3   .   .  [0] [1] [2] [3]  .
            .   .   0   1   2   3  [0] [1] [2] [3]  .   .

    1f1b    0   1   2   .   .  [0]  3  [1]  .  [2]  .  [3]
            .   0   1   .  [0]  2  [1]  3  [2]  .  [3]  .
            .   .   0  [0]  1  [1]  2  [2]  3  [3]  .   .

`gpipe` (Huang et al. 2019, "GPipe") runs all forwards, then all backwards, so a stage keeps up to
m micro-batches in flight. `1f1b` (Narayanan et al. 2019, "PipeDream"; with the flush at the end of
each step, Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters")
has the same bubble, and stage k keeps at most min(m, n - k) in flight.

In both, backwards run in the order 0, 1, ..., m-1, although the GPipe paper draws them reversed:
gradients are then summed in one order under every schedule, so their sums are equal to the bit.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from tf_mp.table import KINDS, Action, ByDevice, Schedule, listed, needs, start_times

__all__ = ["Action", "Schedule", "build", "check", "names", "needs", "register", "start_times"]


class Rule(NamedTuple):
    """How a named schedule is made, and the memory that it promises."""

    # (num_stages, num_micro_batches, stage_devices) -> the order of actions on each device.
    order: Callable[[int, int, tuple[int, ...]], ByDevice]
    # (stage, num_stages, num_micro_batches) -> most micro-batches in flight in that stage.
    in_flight: Callable[[int, int, int], int]


_RULES: dict[str, Rule] = {}


def names() -> tuple[str, ...]:
    """The names that `build` accepts."""
    return tuple(sorted(_RULES))


def register(
    name: str,
    order: Callable[[int, int, tuple[int, ...]], ByDevice],
    *,
    in_flight: Callable[[int, int, int], int],
) -> None:
    """Adds a schedule under a name.

    Args:
        name: What the person writes in `schedule=`.
        order: Makes the table from (num_stages, num_micro_batches, stage_devices).
        in_flight: The memory bound that `check` holds the table to, from
            (stage, num_stages, num_micro_batches).

    Raises:
        ValueError: if the name is taken.
    """
    if name in _RULES:
        raise ValueError(f"There is already a schedule {name!r}. Expected: a new name.")
    _RULES[name] = Rule(order, in_flight)


def build(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    *,
    stage_devices: Sequence[int] | None = None,
) -> Schedule:
    """Makes the table of a named schedule, and checks it.

    Args:
        name: One of `names()`.
        num_stages: Number of stages, at least 1.
        num_micro_batches: Number of micro-batches, at least 1; it may be below `num_stages`.
        stage_devices: For each stage, the index of its device; by default a device each.

    Returns:
        The checked schedule.

    Raises:
        ValueError: for an unknown name, a count below 1, or a wrong `stage_devices`.

    >>> [str(action) for action in build("1f1b", 2, 2).by_device[1]]
    ['stage_1/forward_0', 'stage_1/backward_0', 'stage_1/forward_1', 'stage_1/backward_1']
    """
    if name not in _RULES:
        close = get_close_matches(str(name), _RULES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Unknown schedule. Received: schedule={name!r}. Expected one of: "
            f"{', '.join(map(repr, names()))}.{hint}"
        )
    for what, count in (("stages", num_stages), ("micro_batches", num_micro_batches)):
        if count < 1:
            raise ValueError(f"Received: {what}={count!r}. Expected: an integer of at least 1.")
    devices = tuple(range(num_stages)) if stage_devices is None else tuple(stage_devices)
    if len(devices) != num_stages or min(devices) < 0:
        raise ValueError(
            f"Received: stage_devices={list(devices)} for {num_stages} stages. "
            "Expected: for each stage the index of its device, from 0."
        )
    table = _RULES[name].order(num_stages, num_micro_batches, devices)
    schedule = Schedule(name, num_stages, num_micro_batches, table)
    check(schedule)
    return schedule


def check(schedule: Schedule) -> None:
    """Raises unless the schedule is complete, free of deadlock and within its memory bound.

    Raises:
        ValueError: naming the missing, doubled or unknown actions, a stage on two devices, the
            actions that wait for each other, or the stage that keeps too much in flight.
    """
    n, m = schedule.num_stages, schedule.num_micro_batches
    counts = Counter(action for row in schedule.by_device for action in row)
    wanted = {Action(k, i, kind) for k in range(n) for i in range(m) for kind in KINDS}
    for problem, actions in (
        ("misses", wanted - set(counts)),
        ("repeats", {action for action, count in counts.items() if count > 1}),
        ("has unknown", set(counts) - wanted),
    ):
        if actions:
            raise ValueError(f"The schedule {schedule.name!r} {problem}: {listed(actions)}.")
    for stage in range(n):
        homes = [d for d, row in enumerate(schedule.by_device) if stage in {a.stage for a in row}]
        if len(homes) > 1:
            raise ValueError(
                f"The schedule {schedule.name!r} puts stage {stage} on devices {homes}. "
                "Expected: one device a stage."
            )
    start_times(schedule)
    rule = _RULES.get(schedule.name)
    for stage in range(n):
        bound = rule.in_flight(stage, n, m) if rule else m
        if schedule.in_flight_max(stage) > bound:
            raise ValueError(
                f"The schedule {schedule.name!r} keeps {schedule.in_flight_max(stage)} "
                f"micro-batches in flight in stage {stage}. Expected: at most {bound}."
            )


def _merge(
    stage_order: Callable[[int, int, int], list[Action]],
    num_stages: int,
    num_micro_batches: int,
    stage_devices: tuple[int, ...],
) -> ByDevice:
    """Joins the order of each stage into one order a device.

    In unit time, each free device takes the next action of one of its stages: that of the earliest
    micro-batch. No two that can run are of the same micro-batch, and a backward that can run is of
    an earlier one than a forward, so memory is freed before more is taken.
    """
    left = [
        list(reversed(stage_order(stage, num_stages, num_micro_batches)))
        for stage in range(num_stages)
    ]
    rows: list[list[Action]] = [[] for _ in range(max(stage_devices) + 1)]
    done: set[Action] = set()
    while any(left):
        ready: dict[int, list[Action]] = {}
        for stage, actions in enumerate(left):
            if actions and done.issuperset(needs(actions[-1], num_stages)):
                ready.setdefault(stage_devices[stage], []).append(actions[-1])
        assert ready, "the orders of the stages wait for each other"
        for device, actions in ready.items():
            action = min(actions, key=lambda a: a.micro_batch)
            left[action.stage].pop()
            rows[device].append(action)
        done.update(row[-1] for row in rows if row)
    return tuple(map(tuple, rows))


def _gpipe(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    return [Action(stage, i, kind) for kind in KINDS for i in range(num_micro_batches)]


def _1f1b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    ahead = _1f1b_in_flight(stage, num_stages, num_micro_batches)
    order = [Action(stage, i, "forward") for i in range(ahead)]
    for i in range(num_micro_batches):
        order.append(Action(stage, i, "backward"))
        if i + ahead < num_micro_batches:
            order.append(Action(stage, i + ahead, "forward"))
    return order


def _1f1b_in_flight(stage: int, num_stages: int, num_micro_batches: int) -> int:
    return min(num_micro_batches, num_stages - stage)


register("gpipe", partial(_merge, _gpipe), in_flight=lambda stage, n, m: m)
register("1f1b", partial(_merge, _1f1b), in_flight=_1f1b_in_flight)
