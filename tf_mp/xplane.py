"""The file that TensorFlow's profiler writes; TensorFlow has no public reader of its own."""

from typing import Any, NamedTuple

__all__ = ["ProfilerEvent", "profiler_events"]


class ProfilerEvent(NamedTuple):
    """One event of TensorFlow's profiler.

    Attributes:
        plane: where it was seen: "/host:CPU", "/device:GPU:0".
        name: for an operation "name:type", or "name" of what the event is about.
        start_ns: when it began.
        end_ns: when it ended.
        stats: further values by name.
    """

    plane: str
    name: str
    start_ns: float
    end_ns: float
    stats: dict[str, Any]


def profiler_events(file: str) -> list[ProfilerEvent]:
    """The events in a file `*.xplane.pb`."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    with open(file, "rb") as stream:
        space.ParseFromString(stream.read())
    found = []
    for plane in space.planes:
        names = {number: stat.name for number, stat in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                about = plane.event_metadata[event.metadata_id]
                start = line.timestamp_ns + event.offset_ps / 1e3
                stats = {names[s.metadata_id]: _stat(s, names) for s in event.stats}
                end = start + event.duration_ps / 1e3
                found.append(ProfilerEvent(plane.name, about.name, start, end, stats))
    return found


def _stat(stat: Any, names: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    if kind is None:
        return None
    return names.get(stat.ref_value) if kind == "ref_value" else getattr(stat, kind)
