"""From what a person writes in `cuts=` to the stage and the device of each operation."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tf_mp import balance, compat, devices, partition, scopes
from tf_mp.graph import Graph
from tf_mp.recording import device_index

__all__ = ["Cut", "as_operations", "feeds", "resolve"]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The decision: `order` of the operations, the stage of each, the device of each stage.

    Attributes:
        kind: `"scopes"`, `"names"`, `"balance"`, `"function"` or `"auto"`.
        partition: The operations of each stage.
        devices: One device string a stage.
    """

    kind: str
    partition: partition.Partition
    devices: tuple[str, ...]


def resolve(
    graph: Graph,
    cuts: Any,
    stages: int | None,
    stage_devices: Sequence[str | int] | None,
    measure: Callable[[Graph, int], list[balance.Operation]],
    max_bytes: Any = None,
    in_flight: Callable[[int], list[int]] = lambda count: [1] * count,
) -> Cut:
    """Cuts a graph.

    Args:
        graph: The traced model.
        cuts: `"scopes"`, `"auto"`, layer names, a balance, a function from an operation to its
            stage, or None: `"scopes"` where two were seen, else `"auto"`.
        stages: Number of stages, or None: as many as the cut says, else as there are devices.
        stage_devices: For each stage its device (a name, or an index into `devices.owned()`).
        measure: Measures the operations for `"auto"`: `measure(graph, stages)`.
        max_bytes: Memory limit of each stage for `"auto"`, in bytes, or None. Weights count
            `STATE_COPIES` times.
        in_flight: For a number of stages, the micro-batches that each keeps at once.

    Raises:
        ValueError: for a cut that is not possible; it says what would be.
    """
    owned = devices.owned()
    how = _How(measure, max_bytes, in_flight)
    kind, found, labels = _partition(graph, cuts, stages, len(owned), how)
    count = len(found.stages)
    if stages is not None and count != stages:
        raise ValueError(
            f"Received: {stages=} and cuts={cuts!r}, which makes {count} stages. Expected: the "
            "same number; leave one of the two out."
        )
    return Cut(kind, found, _devices(stage_devices, labels, count, owned))


#: A weight, its gradient, and two slots (Adam): what a limit in bytes must hold of each weight.
STATE_COPIES = 4


@dataclasses.dataclass(frozen=True)
class _How:
    """How the automatic cut measures, and what it must hold."""

    measure: Callable[[Graph, int], list[balance.Operation]]
    max_bytes: Any
    in_flight: Callable[[int], list[int]]

    def automatic(self, graph: Graph, count: int) -> partition.Partition:
        return partition.automatic(
            self.measure(graph, count),
            count,
            max_bytes=self.max_bytes,
            in_flight=self.in_flight(count),
            state_copies=STATE_COPIES,
        )


def as_operations(graph: Graph) -> list[balance.Operation]:
    """The operations by name, without costs."""
    return [balance.Operation(operation.name) for operation in graph.operations]


def feeds(graph: Graph) -> list[list[int]]:
    """For each operation the indices of those whose outputs it reads."""
    home = {key: place for place, op in enumerate(graph.operations) for key in op.outputs}
    return [sorted({home[k] for k in op.inputs if k in home}) for op in graph.operations]


def scopes_of(graph: Graph) -> list[str | None]:
    """The scope of each call, or without recorded ones the device of its variables."""
    if any(operation.scope for operation in graph.operations):
        return [_short(operation.scope) for operation in graph.operations]
    found: list[str | None] = []
    for operation in graph.operations:
        homes = {_short(compat.raw(v).device) for v in operation.variables if v.trainable}
        found.append(homes.pop() if len(homes) == 1 else None)
    return found


def _short(device: str | None) -> str | None:
    index = device_index(device or "")
    return None if index is None else f"/device:{index[0]}:{index[1]}"


def _partition(
    graph: Graph, cuts: Any, stages: int | None, num_owned: int, how: "_How"
) -> tuple[str, partition.Partition, tuple[str, ...]]:
    names = as_operations(graph)
    seen = scopes_of(graph)
    if cuts is None:
        several = len({scope for scope in seen if scope}) > 1
        cuts = "scopes" if several and stages in (None, len({s for s in seen if s})) else "auto"
    if cuts == "scopes":
        found = scopes.by_scopes(names, seen, inputs=feeds(graph))
        if len(found.stages) < 2 and not any(op.scope for op in graph.operations):
            raise ValueError(_one_device(seen))
        return "scopes", found, found.labels
    if cuts == "auto":
        count = stages or min(num_owned, len(names))
        if count == 1:
            return "auto", partition.Partition(len(names), ()), ()
        return "auto", how.automatic(graph, count), ()
    if callable(cuts):
        return "function", _by_function(graph, cuts), ()
    if isinstance(cuts, Sequence) and not isinstance(cuts, str) and cuts:
        if all(isinstance(entry, str) for entry in cuts):
            return "names", partition.by_names(names, list(cuts)), ()
        if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in cuts):
            return "balance", partition.by_balance(names, list(cuts)), ()
    raise ValueError(
        f"Received: {cuts=}. Expected: 'scopes', 'auto', a list of layer names that begin the "
        "stages after the first, a balance such as [4, 3], or a function from an operation to its "
        "stage."
    )


def _by_function(graph: Graph, function: Callable[[Any], int | None]) -> partition.Partition:
    stages = dict(zip(as_operations(graph), map(function, graph.operations), strict=True))
    return scopes.by_function(list(stages), stages.__getitem__, inputs=feeds(graph))


def _one_device(seen: Sequence[str | None]) -> str:
    device = next((scope for scope in seen if scope), None)
    return (
        f"No scopes to cut by. Received: cuts='scopes' and a model whose variables all lie on "
        f"{device}: TensorFlow puts them there where the named device is absent, and where the "
        "model has no keras.Input until it is called. Expected: the function that builds the "
        "model, tf_mp.parallelize(build_model, cuts='scopes'), so that the tf.device blocks are "
        "seen themselves."
    )


def _devices(
    given: Sequence[str | int] | None, labels: Sequence[str], count: int, owned: Sequence[str]
) -> tuple[str, ...]:
    if given is not None:
        if len(given) != count:
            raise ValueError(
                f"Received: devices={list(given)} for {count} stages. Expected: one device for "
                "each stage; several stages may name the same one."
            )
        names = [_at(entry, owned) if isinstance(entry, int) else entry for entry in given]
        return devices.resolve(names)
    if labels:
        numbers = [device_index(label) or ("", 0) for label in labels]
        return tuple(
            _at(number[1], owned, label) for number, label in zip(numbers, labels, strict=True)
        )
    if count > len(owned):
        raise ValueError(
            f"Received: {count} stages. Expected: at most {len(owned)}, the devices of this rank "
            f"({', '.join(owned)}), or devices= with one entry a stage that names some of them "
            "several times."
        )
    return tuple(owned[:count])


def _at(index: int, owned: Sequence[str], label: str | None = None) -> str:
    if not 0 <= index < len(owned):
        raise ValueError(
            f"Received: {label or f'device {index}'}. Expected: a device of this rank, which are "
            f"{', '.join(owned)}. Numbers are local to a rank: its first GPU is GPU:0, whichever "
            "card of the host that is."
        )
    return owned[index]
