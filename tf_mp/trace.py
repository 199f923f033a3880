"""A timeline as a trace that Perfetto and chrome://tracing open, with Horovod's own merged in."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tf_mp.simulate import Simulation
from tf_mp.timeline import Timeline

__all__ = ["trace_events", "write"]

_PLANNED = 1000  # thread numbers of the planned rows, above those of the measured ones


def write(
    timeline: Timeline, planned: Simulation | None, path: str | Path, *, rank: int = 0
) -> None:
    """Writes a trace in the JSON of Chrome's trace viewer.

    Where the environment's HOROVOD_TIMELINE names a file, its events are merged in; they have a
    clock of their own, so only their lengths can be compared.

    Args:
        timeline: the measured steps.
        planned: the predicted step, drawn once beside the measured ones; None for none.
        path: the file to write.
        rank: the rank, which becomes the process in the trace.
    """
    events = list(trace_events(timeline, planned, rank))
    events += _horovod_events(rank)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def trace_events(
    timeline: Timeline, planned: Simulation | None, rank: int = 0
) -> Iterator[dict[str, Any]]:
    """The events of the trace; times in microseconds, steps one after another."""
    devices = list(dict.fromkeys(timeline.devices))
    yield _named("process_name", rank, 0, f"rank {rank}")
    for number, device in enumerate(devices):
        yield _named("thread_name", rank, number, f"{device} measured")
        yield _named("thread_name", rank, _PLANNED + number, f"{device} planned")
    origin = 0.0
    for step in timeline.steps:
        for span in step.spans:
            name = span.name if span.micro_batch is None else f"{span.name} {span.micro_batch}"
            where = devices.index(span.device) if span.device in devices else len(devices)
            begin, length = origin + span.start_ms, span.end_ms - span.start_ms
            details = {"stage": span.stage, "busy_ms": span.busy_ms}
            yield _event(f"{name} (stage {span.stage})", rank, where, begin, length, details)
        origin += step.step_ms
    for action, start in planned.start_ms.items() if planned else ():
        where = _PLANNED + devices.index(timeline.devices[action.stage])
        length = planned.end_ms[action] - start if planned else 0.0
        name = f"{action.kind} {action.micro_batch} (stage {action.stage})"
        yield _event(name, rank, where, start, length, {"stage": action.stage})


def _event(
    name: str, rank: int, thread: int, start_ms: float, length_ms: float, details: dict[str, Any]
) -> dict[str, Any]:
    place = {"name": name, "ph": "X", "pid": rank, "tid": thread, "args": details}
    return {**place, "ts": start_ms * 1000, "dur": length_ms * 1000}


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _horovod_events(rank: int) -> list[dict[str, Any]]:
    """The events of Horovod's own timeline, whose list may lack its end while Horovod runs."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if not path or not Path(path).is_file():
        return []
    text = Path(path).read_text().rstrip().rstrip(",")
    try:
        events = json.loads(text if text.endswith("]") else text + "]")
    except ValueError:
        return []
    moved = [event for event in events if isinstance(event, dict) and event]
    return [{**event, "pid": f"Horovod, tensor {event.get('pid', 0)}"} for event in moved]
