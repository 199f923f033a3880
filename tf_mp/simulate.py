"""What a schedule costs in time before it runs: simulation, published bubbles, bounds.

Pure Python. Times are per micro-batch and stage: t is the forward and the backward of a stage
together, u its update (once a step). n is the number of stages, m that of micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from tf_mp.table import Action, Schedule, start_times

__all__ = [
    "Simulation",
    "bubble_fraction",
    "bubble_over_ideal",
    "pipeline_ms",
    "simulate",
    "speedup_bound",
]

_ROUNDS = 5  # times depend on who works meanwhile, which depends on the times


class _Update(NamedTuple):
    """The optimizer update of a stage, which a device does after its actions."""

    stage: int
    kind: str = "update"


_Task: TypeAlias = Action | _Update


@dataclass(frozen=True)
class Simulation:
    """A schedule laid out in time.

    Attributes:
        step_ms: From the start of the step to the end of the last update.
        start_ms: When each action starts, counted from the start of the step.
        end_ms: When each action ends.
        busy_ms: For each device that has a stage, the time it works (forward, backward, update).
        in_flight_max: For each stage, the most micro-batches in flight.
    """

    step_ms: float
    start_ms: dict[Action, float]
    end_ms: dict[Action, float]
    busy_ms: tuple[float, ...]
    in_flight_max: tuple[int, ...]

    @property
    def utilisation(self) -> tuple[float, ...]:
        """For each device, the share of the step in which it works."""
        return tuple(busy / self.step_ms if self.step_ms else 0.0 for busy in self.busy_ms)

    @property
    def bubble(self) -> float:
        """The share of the step in which a device waits, mean over the devices."""
        return 1 - sum(self.utilisation) / len(self.utilisation)


def simulate(
    schedule: Schedule,
    forward_ms: Sequence[float],
    *,
    backward_ms: Sequence[float],
    update_ms: Sequence[float] | None = None,
    transfer_ms: Sequence[float] | None = None,
    alone_ms: Sequence[Sequence[float]] | None = None,
    lead_in_ms: float = 0.0,
) -> Simulation:
    """Runs a schedule with given times: each action starts as soon as device and inputs allow.

    Args:
        schedule: A checked table, from `schedule.build`.
        forward_ms: For each stage, the forward of one micro-batch.
        backward_ms: For each stage, the backward of one micro-batch.
        update_ms: For each stage, its optimizer update, run once after its last backward.
        transfer_ms: For each of the n - 1 boundaries, how long one micro-batch's boundary tensors
            (or their gradients) travel. It delays the receiver and occupies neither device;
            between two stages of one device it is 0.
        alone_ms: Forward, backward and update of each stage once more, for the time in which all
            other devices wait: CPU devices share their cores. While some of them work, the time
            is in between, in proportion to their number.
        lead_in_ms: What the host does before the first action can start.

    Raises:
        ValueError: for a list of the wrong length or a negative time.
    """
    n = schedule.num_stages
    transfer = _checked("transfer_ms", transfer_ms, n - 1)
    crowded = _by_kind(n, forward_ms, backward_ms, update_ms)
    alone = crowded if alone_ms is None else _by_kind(n, *alone_ms)

    def delay(before: Action, after: Action) -> float:
        if schedule.stage_devices[before.stage] == schedule.stage_devices[after.stage]:
            return 0.0
        return transfer[min(before.stage, after.stage)]

    times = {task: crowded[task.kind][task.stage] for row in _tasks(schedule) for task in row}
    spans = _laid_out(schedule, times, delay)
    for _ in range(_ROUNDS if alone_ms is not None else 0):
        for device, row in enumerate(spans):
            for task, (start, end) in row.items():
                company = _company(spans, device, start, end)
                quick, slow = (kinds[task.kind][task.stage] for kinds in (alone, crowded))
                times[task] = quick + (slow - quick) * company
        spans = _laid_out(schedule, times, delay)
    used = [
        {task: (start + lead_in_ms, end + lead_in_ms) for task, (start, end) in row.items()}
        for row in spans
        if row
    ]
    of_action = {
        task: span for row in used for task, span in row.items() if isinstance(task, Action)
    }
    return Simulation(
        step_ms=max(end for row in used for _, end in row.values()),
        start_ms={action: start for action, (start, _) in of_action.items()},
        end_ms={action: end for action, (_, end) in of_action.items()},
        busy_ms=tuple(sum(end - start for start, end in row.values()) for row in used),
        in_flight_max=tuple(map(schedule.in_flight_max, range(n))),
    )


def _by_kind(num_stages: int, forward: Any, backward: Any, update: Any) -> dict[str, list[float]]:
    return {
        "forward": _checked("forward_ms", forward, num_stages),
        "backward": _checked("backward_ms", backward, num_stages),
        "update": _checked("update_ms", update, num_stages),
    }


def _tasks(schedule: Schedule) -> list[list[_Task]]:
    """For each device its actions and then the updates of its stages."""
    return [
        [
            *row,
            *(_Update(k) for k, home in enumerate(schedule.stage_devices) if home == index),
        ]
        for index, row in enumerate(schedule.by_device)
    ]


def _laid_out(
    schedule: Schedule, times: dict[_Task, float], delay: Callable[[Action, Action], float]
) -> list[dict[_Task, tuple[float, float]]]:
    """For each device when each of its tasks starts and ends."""
    starts = start_times(schedule, times.__getitem__, delay)
    spans: list[dict[_Task, tuple[float, float]]] = []
    for row in _tasks(schedule):
        found: dict[_Task, tuple[float, float]] = {}
        free_at = 0.0
        for task in row:
            start = starts[task] if isinstance(task, Action) else free_at
            free_at = start + times[task]
            found[task] = start, free_at
        spans.append(found)
    return spans


def _company(
    spans: list[dict[_Task, tuple[float, float]]], device: int, start: float, end: float
) -> float:
    """The share of the other devices that work, mean over a span of time."""
    others = [row for index, row in enumerate(spans) if row and index != device]
    if end <= start or not others:
        return 0.0
    shared = sum(
        max(0.0, min(end, last) - max(start, first))
        for row in others
        for first, last in row.values()
    )
    return shared / (end - start) / len(others)


def pipeline_ms(
    stage_ms: Sequence[float],
    num_micro_batches: int,
    *,
    update_ms: Sequence[float] = (0.0,),
) -> float:
    """sum(t) + (m - 1) max(t) + max(u): the step of a linear pipeline, one device a stage.

    The first micro-batch passes all stages, the others follow at the pace of the slowest, then the
    slowest update ends. For equal stages and updates it is what `simulate` gives under `gpipe` and
    `1f1b`; for unequal ones it is the yardstick that measured steps are compared with.

    >>> pipeline_ms([2.0, 3.0], 4, update_ms=[1.0, 0.5])
    15.0
    """
    return sum(stage_ms) + (num_micro_batches - 1) * max(stage_ms) + max(update_ms)


def bubble_fraction(num_stages: int, num_micro_batches: int) -> float:
    """(n - 1) / (m + n - 1): idle share of all device time, for equal stages.

    From Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", section 2.3 (K stages, M micro-batches). The same holds for `1f1b`, whose flush
    leaves as many idle slots; see `bubble_over_ideal`.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def bubble_over_ideal(num_stages: int, num_micro_batches: int) -> float:
    """(n - 1) / m: idle time over the ideal time m x t, for equal stages, `gpipe` and `1f1b`.

    From Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", section 2.2.1. With b for this ratio, `bubble_fraction` is b / (1 + b).
    """
    return (num_stages - 1) / num_micro_batches


def speedup_bound(device_ms: Sequence[float]) -> float:
    """sum(t) / max(t): what splitting can gain at most over one device, for any m.

    Args:
        device_ms: For each device, the forward and backward of all its stages.

    Two devices that weigh 76 : 24 cannot be more than 1.32 times as fast as one:

    >>> round(speedup_bound([76.0, 24.0]), 2)
    1.32
    """
    slowest = max(device_ms)
    return sum(device_ms) / slowest if slowest else float(len(device_ms))


def _checked(what: str, times: Sequence[float] | None, count: int) -> list[float]:
    listed = [0.0] * count if times is None else [float(time) for time in times]
    if len(listed) != count or any(not time >= 0 for time in listed):
        raise ValueError(f"Received: {what}={listed}. Expected: {count} times of at least 0.")
    return listed
