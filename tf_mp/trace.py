"""What is written of a timeline: a trace for Perfetto, JSON, a picture, TensorBoard's graph."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tf_mp.placement import Proof
from tf_mp.simulate import Simulation
from tf_mp.timeline import Timeline

__all__ = ["record", "trace_events", "write", "write_graph"]

_TALK = 999
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


def record(model: Any, batch: tuple[Any, ...], folder: str | Path, *, steps: int = 5) -> Timeline:
    """Measures some steps of a split model and writes what they show into a folder.

    Each rank writes `timeline-rank<r>` with the suffixes `.trace.json` (for Perfetto),
    `.json` and `.png`, and the graph with its devices for TensorBoard. The model stays as it was.

    Args:
        model: a compiled model that went through `tf_mp.parallelize`.
        batch: ``(x, y)`` or ``(x, y, sample_weight)`` as arrays of one local batch.
        folder: where to write; it is made if it is not there.
        steps: how many steps to measure.
    """
    from tf_mp import pictures, placement, simulate, timeline, world

    rank = world.current().rank
    base = Path(folder) / f"timeline-rank{rank}"
    base.parent.mkdir(parents=True, exist_ok=True)
    found = timeline.measure(model, batch, steps=steps)
    planned = simulate.simulate(
        found.schedule,
        found.stage_ms("forward"),
        backward_ms=found.stage_ms("backward"),
        update_ms=found.stage_ms("optimizer"),
    )
    write(found, planned, base.with_suffix(".trace.json"), rank=rank)
    base.with_suffix(".json").write_text(json.dumps(found.to_json(planned), indent=1) + "\n")
    pictures.draw_timeline(found, planned, base.with_suffix(".png"))
    write_graph(placement.verify_placement(model, batch), base.parent)
    return found


def write_graph(proof: Proof, log_dir: str | Path) -> None:
    """Writes the graph that ran for TensorBoard's Graphs page, which can colour it by device."""
    import tensorflow as tf

    ops = proof.run.ops
    names = [f"{op.name}_{op.index}" if "/" not in op.name else op.name for op in ops]
    graph = tf.compat.v1.GraphDef()
    for op, name in zip(ops, names, strict=True):
        node = graph.node.add(name=name, op=op.type, device=op.device)
        node.input.extend(names[i] for i in op.inputs)
        node.input.extend(f"^{names[i]}" for i in op.controls)
    with tf.summary.create_file_writer(str(log_dir)).as_default():
        tf.summary.graph(graph)


def trace_events(
    timeline: Timeline, planned: Simulation | None, rank: int = 0
) -> Iterator[dict[str, Any]]:
    """The events of the trace; times in microseconds, steps one after another."""
    devices = list(dict.fromkeys(timeline.devices))
    yield _named("process_name", rank, 0, f"rank {rank}")
    for number, device in enumerate(devices):
        yield _named("thread_name", rank, number, f"{device} measured")
        yield _named("thread_name", rank, _PLANNED + number, f"{device} planned")
    if any(step.communication for step in timeline.steps):
        yield _named("thread_name", rank, _TALK, "reductions over ranks")
    origin = 0.0
    for step in timeline.steps:
        for span in step.spans:
            name = span.name if span.micro_batch is None else f"{span.name} {span.micro_batch}"
            where = devices.index(span.device) if span.device in devices else len(devices)
            begin, length = origin + span.start_ms, span.end_ms - span.start_ms
            details = {"stage": span.stage, "busy_ms": span.busy_ms}
            yield _event(f"{name} (stage {span.stage})", rank, where, begin, length, details)
        for start, stop in step.communication:
            yield _event("reduction", rank, _TALK, origin + start, stop - start, {})
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
