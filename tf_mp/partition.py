"""The partition: an ordered list of operations cut into stages; pure Python.

A stage is a run of consecutive operations, never an empty one. A boundary is the index of the
operation that begins a stage, so n stages have n - 1 boundaries. Every cut here gives a
`Partition`, or raises a `ValueError` that says how to mend it. `scopes.py` cuts by label.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, pairwise

from tf_mp.balance import Limits, Operation, best_boundaries, smallest_limit

__all__ = ["Operation", "Partition", "automatic", "by_balance", "by_names"]


@dataclass(frozen=True)
class Partition:
    """A list of operations cut into stages.

    Attributes:
        num_operations: Length of the list.
        boundaries: The index of the first operation of each stage but the first.
        order: The order of the operations in which the cut holds: for each place, the index in
            the list that was given. Empty means unchanged; only cuts by label change it.
        labels: For each stage its label (a device string), after a cut by scopes.

    >>> Partition(7, (4,)).balance
    [4, 3]
    """

    num_operations: int
    boundaries: tuple[int, ...]
    order: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Fills in the order, and holds that nothing is lost and no stage is empty."""
        if not self.order:
            object.__setattr__(self, "order", tuple(range(self.num_operations)))
        assert sorted(self.order) == list(range(self.num_operations)), "an operation is lost"
        assert min(self.balance) > 0, "a stage is empty"

    @property
    def stages(self) -> tuple[range, ...]:
        """For each stage, the places of its operations in `order`."""
        edges = (0, *self.boundaries, self.num_operations)
        return tuple(range(start, stop) for start, stop in pairwise(edges))

    @property
    def balance(self) -> list[int]:
        """The number of operations of each stage: what `cuts=` accepts."""
        edges = (0, *self.boundaries, self.num_operations)
        return [stop - start for start, stop in pairwise(edges)]

    def stage_of(self, index: int) -> int:
        """The stage of the operation that had this index in the list that was given."""
        place = self.order.index(index)
        return sum(boundary <= place for boundary in self.boundaries)


def by_names(operations: Sequence[Operation], names: Sequence[str]) -> Partition:
    """Cuts in front of the named operations: each name begins a stage.

    Args:
        operations: The ordered list. Of a name that stands in it twice, the first counts.
        names: The first operation of each stage but the first, in the order of the list.

    Raises:
        ValueError: for an unknown name, names out of order, or a stage that would be empty.
    """
    places: dict[str, int] = {}
    for place, operation in enumerate(operations):
        places.setdefault(operation.name, place)
    for name in names:
        if name not in places:
            close = get_close_matches(str(name), places, n=3) or list(places)[:8]
            raise ValueError(
                f"No operation of this name. Received: cuts={list(names)!r}, with {name!r}. "
                f"Expected: names of layers that begin a stage, such as "
                f"{', '.join(map(repr, close))}."
            )
    boundaries = [places[name] for name in names]
    if boundaries != sorted(boundaries):
        ordered = sorted(names, key=lambda name: places[name])
        raise ValueError(
            f"The cuts go back. Received: cuts={list(names)!r}. Expected: the order of the model, "
            f"cuts={ordered!r}."
        )
    for before, place in pairwise((0, *boundaries)):
        if before == place:
            raise ValueError(
                f"A stage would be empty. Received: cuts={list(names)!r}. Expected: each name "
                f"once, and not {operations[0].name!r}, which begins the first stage anyway."
            )
    return Partition(len(operations), tuple(boundaries))


def by_balance(operations: Sequence[Operation], balance: Sequence[int]) -> Partition:
    """Cuts by the number of operations of each stage.

    Args:
        operations: The ordered list.
        balance: The number of operations of each stage, such as `[4, 3]`.

    Raises:
        ValueError: if the numbers do not add up, or a stage would be empty; it prints a balance
            that is as even as the costs of the operations allow, ready to paste.
    """
    _check_stages(operations, len(balance))
    wrong = ""
    if min(balance) < 1:
        wrong = f"stage {list(balance).index(min(balance))} would be empty"
    elif sum(balance) != len(operations):
        wrong = f"it adds up to {sum(balance)}, and the model has {len(operations)} operations"
    if wrong:
        good = automatic(operations, len(balance)).balance
        raise ValueError(
            f"Received: cuts={list(balance)}; {wrong}. Expected: for each stage its number of "
            f"operations, for example cuts={good}."
        )
    return Partition(len(operations), tuple(accumulate(balance[:-1])))


def automatic(
    operations: Sequence[Operation],
    num_stages: int,
    *,
    max_bytes: int | Sequence[int | None] | None = None,
    speeds: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
    state_copies: float = 1.0,
    transfer_ms_per_byte: float = 0.0,
) -> Partition:
    """The cut whose slowest stage is fastest; see `balance.py`.

    Args:
        operations: The ordered list, with costs. If no cost is above 0, all count the same.
        num_stages: Number of stages.
        max_bytes: The memory limit of a stage, one for all or one for each (None: no limit).
        speeds: For each stage, the speed of its device; equal by default.
        in_flight: For each stage, the micro-batches whose activations it keeps; 1 by default.
        state_copies: Bytes of weights, gradients and slots for each byte of weights.
        transfer_ms_per_byte: What a byte that crosses costs each of its two stages.

    Returns:
        The best cut; among equals the one over which the fewest bytes cross.

    Raises:
        ValueError: for more stages than operations, lists of the wrong length, or a memory limit
            that no cut keeps.
    """
    _check_stages(operations, num_stages)
    if not any(operation.cost_ms > 0 for operation in operations):
        operations = [operation._replace(cost_ms=1.0) for operation in operations]
    each = max_bytes if isinstance(max_bytes, Sequence) else [max_bytes] * num_stages
    limits = Limits(
        max_bytes=tuple(each),
        speeds=tuple(speeds or [1.0] * num_stages),
        in_flight=tuple(in_flight or [1] * num_stages),
        state_copies=state_copies,
        transfer_ms_per_byte=transfer_ms_per_byte,
    )
    for what in ("max_bytes", "speeds", "in_flight"):
        given = getattr(limits, what)
        if len(given) != num_stages or any(value is not None and value <= 0 for value in given):
            raise ValueError(
                f"Received: {what}={list(given)}. Expected: {num_stages} numbers above 0, one for "
                "each stage."
            )
    boundaries = best_boundaries(operations, limits)
    if boundaries is None:
        raise ValueError(_does_not_fit(operations, limits))
    return Partition(len(operations), boundaries)


def _check_stages(operations: Sequence[Operation], num_stages: int) -> None:
    if not 1 <= num_stages <= len(operations):
        raise ValueError(
            f"Received: stages={num_stages} for {len(operations)} operations. Expected: 1 to "
            f"{len(operations)} stages, so that each has at least one operation."
        )


def _does_not_fit(operations: Sequence[Operation], limits: Limits) -> str:
    def alone(operation: Operation) -> float:
        return (
            limits.state_copies * operation.weight_bytes
            + min(limits.in_flight) * operation.activation_bytes
        )

    largest = max(operations, key=alone)
    least = int(smallest_limit(operations, limits))
    return (
        f"No cut into {len(limits.speeds)} stages keeps the memory limit. Received: "
        f"max_bytes={list(limits.max_bytes)}. Expected: at least {least} bytes for every stage; "
        f"the largest operation, {largest.name!r}, takes {int(alone(largest))} alone. Use more "
        "stages, more memory, smaller micro-batches, or recompute=True."
    )
