"""Cuts by label: the person's own `tf.device` scopes, or a function; pure Python.

Keras lists the operations of a model by depth, so two parallel branches under two devices come
interleaved. A cut by label therefore looks at what feeds what, not at the places in the list: the
stages are the labels in an order in which no stage uses a later one, and the operations are
sorted by stage, which keeps every operation behind what feeds it.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from tf_mp.balance import Operation
from tf_mp.partition import Partition

__all__ = ["by_function", "by_scopes"]

Inputs = Sequence[Sequence[int]]


def by_scopes(
    operations: Sequence[Operation],
    scopes: Sequence[str | None],
    *,
    inputs: Inputs | None = None,
) -> Partition:
    """Makes one stage of each scope.

    Args:
        operations: The list, each operation behind what feeds it.
        scopes: For each operation its device string, or None: it then goes with what feeds it
            (the latest stage of its inputs), and with what it feeds if nothing does.
        inputs: For each operation the indices of those that feed it; by default the one before.

    Returns:
        The partition, with `order` and `labels` filled in.

    Raises:
        ValueError: if there is no scope at all, or if the scopes go back: a stage would need the
            result of a later one.
    """
    assert len(scopes) == len(operations)
    feeds = _chain(operations) if inputs is None else inputs
    first: dict[str, int] = {}
    for place, scope in enumerate(scopes):
        if scope is not None:
            first.setdefault(scope, place)
    if not first:
        raise ValueError(
            "Received: cuts='scopes', and no layer was called under a tf.device scope. Expected: "
            "`with tf.device(...)` around the layers in the function that builds the model, or "
            "another way to cut, such as cuts='auto'."
        )
    edges = _edges(scopes, feeds)
    ranked = _ranked(first, edges)
    if len(ranked) < len(first):
        raise ValueError(_goes_back(operations, first, edges))
    stages = _fill([None if s is None else ranked.index(s) for s in scopes], feeds)
    return _sorted_partition(stages, tuple(ranked))


def by_function(
    operations: Sequence[Operation],
    function: Callable[[Any], int | None],
    *,
    inputs: Inputs | None = None,
) -> Partition:
    """Asks a function for the stage of each operation.

    Args:
        operations: The list, each operation behind what feeds it; anything with a `name`.
        function: Gets an operation and returns the index of its stage, or None: it then goes with
            what feeds it.
        inputs: For each operation the indices of those that feed it; by default the one before.

    Raises:
        ValueError: if a stage gets no operation, or needs the result of a later one.
    """
    feeds = _chain(operations) if inputs is None else inputs
    wanted = [function(operation) for operation in operations]
    given = {stage for stage in wanted if stage is not None}
    if given != set(range(len(given))) or not given:
        raise ValueError(
            f"Received: a function for cuts= that names the stages {sorted(given)}. Expected: 0, "
            "1, 2, ... without a gap, so that no stage is empty."
        )
    stages = _fill(wanted, feeds)
    for place, sources in enumerate(feeds):
        for source in sources:
            if stages[source] > stages[place]:
                raise ValueError(
                    f"The cut goes back: {operations[place].name!r} in stage {stages[place]} uses "
                    f"the output of {operations[source].name!r} in stage {stages[source]}. "
                    "Expected: a stage uses earlier stages only."
                )
    return _sorted_partition(stages, ())


def _chain(operations: Sequence[Operation]) -> Inputs:
    return [[place - 1] if place else [] for place in range(len(operations))]


def _edges(scopes: Sequence[str | None], feeds: Inputs) -> dict[tuple[str, str], tuple[int, int]]:
    """Which scope feeds which, also through operations without one, with an example of each."""
    sources: list[dict[str, int]] = []  # for each operation: scope -> an operation of it
    edges: dict[tuple[str, str], tuple[int, int]] = {}
    for place, scope in enumerate(scopes):
        reached = {s: at for feed in feeds[place] for s, at in sources[feed].items()}
        if scope is None:
            sources.append(reached)
            continue
        for source, at in reached.items():
            if source != scope:
                edges.setdefault((source, scope), (at, place))
        sources.append({scope: place})
    return edges


def _ranked(first: dict[str, int], edges: dict[tuple[str, str], tuple[int, int]]) -> list[str]:
    """The scopes, each behind those that feed it, else as they appear; a cycle is left out."""
    ranked: list[str] = []
    while True:
        free = [
            scope
            for scope in first
            if scope not in ranked and all(a in ranked for a, b in edges if b == scope)
        ]
        if not free:
            return ranked
        ranked.append(min(free, key=lambda scope: first[scope]))


def _goes_back(
    operations: Sequence[Operation],
    first: dict[str, int],
    edges: dict[tuple[str, str], tuple[int, int]],
) -> str:
    for (source, scope), (at, place) in edges.items():
        if first[scope] < first[source] and _reaches(scope, source, edges):
            return (
                f"The scopes go back: {operations[place].name!r} under {scope!r} uses the output "
                f"of {operations[at].name!r} under {source!r}, which itself needs {scope!r}. "
                f"Expected: a stage uses earlier stages only. Move {operations[place].name!r} "
                f"under {source!r}, or under a device of its own."
            )
    raise AssertionError("a cycle has an edge that goes back")


def _reaches(source: str, target: str, edges: Iterable[tuple[str, str]]) -> bool:
    reached, grown = {source}, True
    while grown:
        more = {b for a, b in edges if a in reached} - reached
        reached |= more
        grown = bool(more)
    return target in reached


def _fill(wanted: Sequence[int | None], feeds: Inputs) -> list[int]:
    """Gives operations without a stage the one of what feeds them, or else of what they feed."""
    stages = list(wanted)
    consumers: list[list[int]] = [[] for _ in stages]
    for place, sources in enumerate(feeds):
        known = [stage for source in sources if (stage := stages[source]) is not None]
        if stages[place] is None and known:
            stages[place] = max(known)
        for source in sources:
            consumers[source].append(place)
    for place in reversed(range(len(stages))):
        known = [stage for user in consumers[place] if (stage := stages[user]) is not None]
        if stages[place] is None:
            stages[place] = min(known, default=0)
    return [stage for stage in stages if stage is not None]


def _sorted_partition(stages: Sequence[int], labels: tuple[str, ...]) -> Partition:
    order = sorted(range(len(stages)), key=lambda place: stages[place])
    counts = [stages.count(stage) for stage in range(max(stages) + 1)]
    boundaries = tuple(accumulate(counts[:-1]))
    return Partition(len(stages), boundaries, tuple(order), labels)
