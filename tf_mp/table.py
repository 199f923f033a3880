"""The table of a schedule: actions, what each needs, and when each can start; pure data."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Action", "Schedule", "needs", "start_times"]

Kind = Literal["forward", "backward"]
KINDS: tuple[Kind, ...] = ("forward", "backward")
ByDevice = tuple[tuple["Action", ...], ...]


class Action(NamedTuple):
    """The forward or the backward of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    kind: Kind

    def __str__(self) -> str:
        """The name scope of its operations in the graph."""
        return f"stage_{self.stage}/{self.kind}_{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """A table of actions: for each device, what it does, in order.

    Attributes:
        name: The registered name, `"gpipe"` or `"1f1b"`.
        num_stages: Number of stages, n.
        num_micro_batches: Number of micro-batches, m.
        by_device: For each device, its actions in the order in which they run.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    by_device: ByDevice

    @property
    def stage_devices(self) -> tuple[int, ...]:
        """The index of the device of each stage."""
        found = {action.stage: d for d, row in enumerate(self.by_device) for action in row}
        return tuple(found[stage] for stage in range(self.num_stages))

    def total_order(self) -> list[Action]:
        """All actions in one order that keeps the dependencies and each device's order.

        Returns:
            The actions by start in unit time, then by device. A graph built in this order finds
            every input of an action already built.
        """
        starts = start_times(self)
        device = self.stage_devices
        return sorted(starts, key=lambda action: (starts[action], device[action.stage]))

    def grid(
        self,
        forward_ticks: int | Sequence[int] = 1,
        backward_ticks: int | Sequence[int] = 1,
    ) -> list[list[Action | None]]:
        """The table to draw: one row a device, one cell a tick, None where the device waits.

        Args:
            forward_ticks: Ticks of a forward, for all stages or one number a stage.
            backward_ticks: Ticks of a backward, likewise.
        """
        ticks = {
            "forward": _per_stage(forward_ticks, self.num_stages, "forward_ticks"),
            "backward": _per_stage(backward_ticks, self.num_stages, "backward_ticks"),
        }
        starts = start_times(self, lambda action: ticks[action.kind][action.stage])
        end = max(start + ticks[a.kind][a.stage] for a, start in starts.items())
        table: list[list[Action | None]] = [[None] * int(end) for _ in self.by_device]
        for device, row in enumerate(self.by_device):
            for action in row:
                for tick in range(ticks[action.kind][action.stage]):
                    table[device][int(starts[action]) + tick] = action
        return table

    def in_flight_max(self, stage: int) -> int:
        """Most micro-batches of `stage` whose forward has run and whose backward has not."""
        now = most = 0
        for row in self.by_device:
            for action in row:
                if action.stage == stage:
                    now += 1 if action.kind == "forward" else -1
                    most = max(most, now)
        return most


def needs(action: Action, num_stages: int) -> list[Action]:
    """The actions of which `action` uses the results directly."""
    stage, micro_batch, kind = action
    if kind == "forward":
        return [Action(stage - 1, micro_batch, kind)] if stage else []
    later = [Action(stage + 1, micro_batch, kind)] if stage + 1 < num_stages else []
    return [Action(stage, micro_batch, "forward"), *later]


def start_times(
    schedule: Schedule,
    duration: Callable[[Action], float] = lambda action: 1,
    delay: Callable[[Action, Action], float] = lambda before, after: 0,
) -> dict[Action, float]:
    """When each action starts, if it starts as soon as its device and its inputs allow.

    Args:
        schedule: The table to run.
        duration: How long an action takes.
        delay: How long a result travels from one action to another that needs it.

    Raises:
        ValueError: if the table deadlocks; it names what waits for what.
    """
    starts: dict[Action, float] = {}
    free_at: list[float] = [0] * len(schedule.by_device)
    left = [list(reversed(row)) for row in schedule.by_device]
    while any(left):
        progress = False
        for device, row in enumerate(left):
            while row and all(need in starts for need in needs(row[-1], schedule.num_stages)):
                action = row.pop()
                inputs = needs(action, schedule.num_stages)
                ready = [starts[need] + duration(need) + delay(need, action) for need in inputs]
                starts[action] = max([free_at[device], *ready])
                free_at[device] = starts[action] + duration(action)
                progress = True
        if not progress:
            waits = [
                f"{row[-1]} waits for "
                f"{listed([a for a in needs(row[-1], schedule.num_stages) if a not in starts])}"
                for row in left
                if row
            ]
            raise ValueError(f"The schedule {schedule.name!r} deadlocks: {'; '.join(waits)}.")
    return starts


def _per_stage(ticks: int | Sequence[int], num_stages: int, what: str) -> list[int]:
    listed = list(ticks) if isinstance(ticks, Sequence) else [ticks] * num_stages
    if len(listed) != num_stages or any(t != int(t) or t < 1 for t in listed):
        raise ValueError(
            f"Received: {what}={ticks!r}. Expected: whole ticks of at least 1, one number for all "
            f"or one for each of the {num_stages} stages."
        )
    return listed


def listed(actions: Iterable[Action], most: int = 5) -> str:
    """The first few actions, for a message."""
    ordered = sorted(actions)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(map(str, ordered[:most])) + more
