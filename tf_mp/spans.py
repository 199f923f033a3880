"""Actions as they ran, made of the profiler's events and the graphs of the same step.

The profiler names each operation as the graph does, so its name scope tells the action
(`opnames.py`), and the step's run metadata tells the device. A device is busy while at least one
operation of an action runs on it; reductions over ranks are communication and count apart.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from tf_mp import opnames, ordering, rules, runs, xplane
from tf_mp.table import Action

__all__ = ["STEP", "Span", "Step", "read_steps", "total", "union"]

STEP = "tf_mp_step"
Interval = tuple[float, float]
_Piece = tuple[runs.Op, Interval]


@dataclasses.dataclass(frozen=True)
class Span:
    """One action as it ran in a step; times in ms from the start of the step.

    Attributes:
        stage: index of the stage.
        name: "forward", "backward", "optimizer" or "collective".
        micro_batch: its index, None for what is done once a step.
        device: where it ran.
        start_ms: start of its first operation.
        end_ms: end of its last operation.
        busy_ms: time in which at least one of its operations ran.
    """

    stage: int
    name: str
    micro_batch: int | None
    device: str
    start_ms: float
    end_ms: float
    busy_ms: float

    @property
    def action(self) -> Action | None:
        """The action of the schedule, None for what is not in its table."""
        if self.micro_batch is None or self.name not in (opnames.FORWARD, opnames.BACKWARD):
            return None
        return Action(self.stage, self.micro_batch, self.name)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Step:
    """One measured step: its length, its spans, and each device's busy intervals in ms."""

    step_ms: float
    spans: tuple[Span, ...]
    busy: dict[str, list[Interval]]
    communication: list[Interval]

    def utilisation(self, device: str) -> float:
        """The share of the step in which a device worked."""
        return total(self.busy.get(device, [])) / self.step_ms

    @property
    def overlapped(self) -> float | None:
        """The share of communication during which some device worked, None without any."""
        alone = total(self.communication)
        if not alone:
            return None
        busy = union(interval for intervals in self.busy.values() for interval in intervals)
        return 1 - (total(union([*busy, *self.communication])) - total(busy)) / alone


def read_steps(events: Sequence[xplane.ProfilerEvent], run: runs.Run) -> tuple[list[Step], bool]:
    """Makes steps of the profiler's events; also whether times are the devices' own."""
    windows = sorted((e.start_ns, e.end_ns) for e in events if e.name == STEP)
    work = _Work(run)
    devices_seen = {e.plane for e in events if "GPU" in e.plane}
    pieces: list[list[_Piece]] = [[] for _ in windows]
    talk: list[list[Interval]] = [[] for _ in windows]
    for event in [*events, *_asynchronous(events)]:
        name = str(event.stats.get("tf_op") or event.name).rpartition(":")[0]
        place = _window(windows, event.start_ns)
        op = work.named(name)
        if op is None or place is None:
            continue
        if devices_seen and "GPU" in op.device and "host" in event.plane:
            continue
        origin = windows[place][0]
        interval = (event.start_ns - origin) / 1e6, (event.end_ns - origin) / 1e6
        if _is_collective(op):
            talk[place].append(interval)
        elif work.counts(op):
            pieces[place].append((op, interval))
    steps = [
        _step((end - start) / 1e6, found, communication, work)
        for (start, end), found, communication in zip(windows, pieces, talk, strict=True)
    ]
    on_gpu = any("GPU" in op.device for op in run.ops)
    return steps, not on_gpu or bool(devices_seen)


class _Work:
    """Which operations of a run are work of an action, and which of them mark its extent."""

    def __init__(self, run: runs.Run) -> None:
        expected = rules.expectations(run, rules.Guess())
        self._ops = {op.name: op for op in run.ops}
        self._actions = expected.actions
        self._cheap = {
            op.index
            for op in run.ops
            if rules.is_cheap(op, expected.actions[op.index], run, expected)
        }
        self._tied = ordering.tied_operations(run)

    def named(self, name: str) -> runs.Op | None:
        return self._ops.get(name)

    def action(self, op: runs.Op) -> opnames.Action:
        action = self._actions[op.index]
        assert action is not None
        return action

    def counts(self, op: runs.Op) -> bool:
        return self._actions[op.index] is not None and op.index not in self._cheap

    def marks(self, op: runs.Op) -> bool:
        """Whether an action of the schedule begins and ends with operations like this one."""
        action = self.action(op)
        if action.micro_batch is None or action.phase not in (opnames.FORWARD, opnames.BACKWARD):
            return True
        key = Action(action.stage, action.micro_batch, action.phase)  # type: ignore[arg-type]
        return op.index in self._tied.get(key, ())


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order.

    >>> union([(0, 2), (1, 3), (5, 6)])
    [(0, 3), (5, 6)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """The time that intervals cover together."""
    return sum(end - start for start, end in union(intervals))


def _step(
    step_ms: float, pieces: list[_Piece], communication: list[Interval], work: _Work
) -> Step:
    times: dict[tuple[int, str, int | None, str], list[Interval]] = {}
    marks: dict[tuple[int, str, int | None, str], list[Interval]] = {}
    busy: dict[str, list[Interval]] = {}
    for op, interval in pieces:
        action = work.action(op)
        key = (action.stage, action.phase, action.micro_batch, op.device)
        times.setdefault(key, []).append(interval)
        busy.setdefault(op.device, []).append(interval)
        if work.marks(op):
            marks.setdefault(key, []).append(interval)
    spans = []
    for key, intervals in times.items():
        extent = marks.get(key, intervals)
        start, end = min(a for a, _ in extent), max(b for _, b in extent)
        spans.append(Span(*key, start, end, total(intervals)))
    spans.sort(key=lambda span: span.start_ms)
    united = {device: union(intervals) for device, intervals in busy.items()}
    return Step(step_ms, tuple(spans), united, union(communication))


def _asynchronous(events: Iterable[xplane.ProfilerEvent]) -> list[xplane.ProfilerEvent]:
    """Operations that go on after their kernel returned, such as reductions, as one event each."""
    starts: dict[tuple[object, object], xplane.ProfilerEvent] = {}
    found = []
    for event in sorted(events, key=lambda event: event.start_ns):
        key = event.stats.get("name"), event.stats.get("step_id")
        if event.name.endswith("ProcessAsync::Start"):
            starts[key] = event
        elif event.name.endswith("ProcessAsync::Done") and key in starts:
            start = starts.pop(key)
            name = f"{key[0]}:{event.stats.get('kernel_type')}"
            found.append(start._replace(name=name, end_ns=event.end_ns))
    return found


def _is_collective(op: runs.Op) -> bool:
    return op.type.startswith(("Horovod", "Nccl", "Collective"))


def _window(windows: Sequence[Interval], time: float) -> int | None:
    return next((i for i, (start, end) in enumerate(windows) if start <= time < end), None)
