"""The best balance: dynamic programming over an ordered list of operations; pure Python.

The step of a pipeline goes at the pace of its slowest stage, so the best cut is the one whose
slowest stage is fastest. With cost(k, i, j) for operations i to j-1 as stage k, the best slowest
stage over the first j operations in k + 1 stages is

    best(k, j) = min over i < j of  max(best(k - 1, i), cost(k, i, j))

which is exact for the given order, in O(n L^2) for L operations. Among the cuts that reach it, the
one over which the fewest bytes cross is taken, then the one with the earliest boundaries: a second
pass of the same recursion, over the stages that are fast enough.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

__all__ = [
    "Limits",
    "Operation",
    "best_boundaries",
    "smallest_limit",
    "stage_bytes",
    "stage_ms",
]


class Operation(NamedTuple):
    """What the partition needs to know about one operation.

    Attributes:
        name: The name of its layer.
        cost_ms: Its forward and backward of one micro-batch, on a device of speed 1.
        cross_bytes: Bytes that cross to the next stage if the cut is just after this operation:
            all tensors made up to here and used later, of one micro-batch.
        weight_bytes: Its weights, in bytes.
        activation_bytes: What it keeps for its backward, of one micro-batch in flight.
    """

    name: str
    cost_ms: float = 0.0
    cross_bytes: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0


class Limits(NamedTuple):
    """What the devices of the stages can hold and do.

    Attributes:
        max_bytes: For each stage, the bytes that it may use, or None for no limit.
        speeds: For each stage, the speed of its device (2.0 is twice as fast as 1.0).
        in_flight: For each stage, the micro-batches whose activations it keeps at once.
        state_copies: Bytes of weights, gradients and slots for each byte of weights.
        transfer_ms_per_byte: What a byte that crosses costs each of its two stages, with the way
            back of its gradient.
    """

    max_bytes: tuple[int | None, ...]
    speeds: tuple[float, ...]
    in_flight: tuple[int, ...]
    state_copies: float
    transfer_ms_per_byte: float


class _Sums:
    """Running sums: the cost and the bytes of any run of operations are one subtraction."""

    def __init__(self, operations: Sequence[Operation], limits: Limits):
        self.limits = limits
        self.num_operations = len(operations)
        self.cost = list(accumulate((o.cost_ms for o in operations), initial=0.0))
        self.weights = list(accumulate((o.weight_bytes for o in operations), initial=0))
        self.activations = list(accumulate((o.activation_bytes for o in operations), initial=0))
        # Bytes that cross at boundary i; nothing crosses before the first and after the last.
        self.cross = [0, *(o.cross_bytes for o in operations[:-1]), 0]

    def ms(self, stage: int, start: int, stop: int) -> float:
        crossing = self.cross[start] + self.cross[stop]
        compute = (self.cost[stop] - self.cost[start]) / self.limits.speeds[stage]
        return compute + crossing * self.limits.transfer_ms_per_byte

    def bytes(self, stage: int, start: int, stop: int) -> float:
        state = self.limits.state_copies * (self.weights[stop] - self.weights[start])
        kept = self.activations[stop] - self.activations[start]
        return state + self.limits.in_flight[stage] * kept

    def fits(self, stage: int, start: int, stop: int) -> bool:
        limit = self.limits.max_bytes[stage]
        return limit is None or self.bytes(stage, start, stop) <= limit


def stage_ms(
    operations: Sequence[Operation], stages: Sequence[range], limits: Limits
) -> list[float]:
    """The time of each stage, transfers included, of one micro-batch."""
    sums = _Sums(operations, limits)
    return [sums.ms(k, stage.start, stage.stop) for k, stage in enumerate(stages)]


def stage_bytes(
    operations: Sequence[Operation], stages: Sequence[range], limits: Limits
) -> list[float]:
    """The bytes of each stage: weights, gradients, slots, and the activations in flight."""
    sums = _Sums(operations, limits)
    return [sums.bytes(k, stage.start, stage.stop) for k, stage in enumerate(stages)]


def best_boundaries(operations: Sequence[Operation], limits: Limits) -> tuple[int, ...] | None:
    """The boundaries of the best cut, or None if no cut keeps the memory limits.

    Args:
        operations: The ordered list, at least as long as there are stages.
        limits: What the stages can hold and do; as many stages as it has speeds.
    """
    sums = _Sums(operations, limits)

    def ms(stage: int, start: int, stop: int) -> float:
        return sums.ms(stage, start, stop) if sums.fits(stage, start, stop) else inf

    num_stages = len(limits.speeds)
    slowest, _ = _solve(ms, max, len(operations), num_stages)
    if slowest == inf:
        return None
    allowed = slowest * (1 + 1e-9)  # cuts that differ by rounding only are equal

    def crossing(stage: int, start: int, stop: int) -> float:
        return sums.cross[start] if ms(stage, start, stop) <= allowed else inf

    return _solve(crossing, lambda before, own: before + own, len(operations), num_stages)[1]


def smallest_limit(operations: Sequence[Operation], limits: Limits) -> float:
    """The smallest `max_bytes`, equal for all stages, with which some cut fits."""
    return _solve(_Sums(operations, limits).bytes, max, len(operations), len(limits.speeds))[0]


def _solve(
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    num_operations: int,
    num_stages: int,
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of all stages, and its lexicographically first boundaries."""
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {stop: (cost(0, 0, stop), ()) for stop in range(1, num_operations + 1)}
    for stage in range(1, num_stages):
        best = {
            stop: min(
                (join(best[start][0], cost(stage, start, stop)), (*best[start][1], start))
                for start in range(stage, stop)
            )
            for stop in range(stage + 1, num_operations + 1)
        }
    return best[num_operations]
