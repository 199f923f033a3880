"""The order of actions: which action of a step must have ended before another begins.

A schedule is enforced only if the graph that ran says so. Here that is read as reachability, over
data and control edges and through the transfers between devices, without a clock: action A comes
before action B if every operation with a cost in A is an ancestor of every such operation in B.
Of a loop the graph has each operation once, so its last iteration is not told from its first:
that a loop waits, and is waited for, as a whole is the work of `stage.loops_in_turn`.

Ancestors are kept as bit sets in Python's integers, so that a graph of 15,000 operations takes
about a second.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, Literal

from tf_mp import opnames, rules, runs
from tf_mp.table import Action

__all__ = ["Order", "order_of", "tied_operations", "unordered_pairs"]

_KINDS: dict[str, Literal["forward", "backward"]] = {
    opnames.FORWARD: "forward",
    opnames.BACKWARD: "backward",
}


@dataclasses.dataclass(frozen=True)
class Order:
    """The actions of a step, and which comes before which.

    Attributes:
        steps: all actions, by stage, phase and micro-batch.
        members: for each action the bit set of its operations.
        common: for each action the operations that are ancestors of all of its own.
        some: for each action the operations that are ancestors of any of its own.
        names: names of the operations, by bit.
    """

    steps: tuple[Action, ...]
    members: dict[Action, int]
    common: dict[Action, int]
    some: dict[Action, int]
    names: tuple[str, ...]

    def before(self, first: Action, second: Action) -> bool:
        """Whether all of `first` must have ended before any of `second` begins."""
        return not self.members[first] & ~self.common[second]

    def independent(self, first: Action, second: Action) -> bool:
        """Whether no operation of either waits for one of the other: they may overlap."""
        return not (self.members[first] & self.some[second]) and not (
            self.members[second] & self.some[first]
        )

    def blame(self, first: Action, second: Action) -> list[str]:
        """Operations of `first` that some operation of `second` does not wait for."""
        loose = self.members[first] & ~self.common[second]
        return [name for place, name in enumerate(self.names) if loose >> place & 1]

    def unordered(self) -> list[tuple[Action, Action]]:
        """Pairs of actions of one stage of which neither comes before the other."""
        return [
            (a, b)
            for a, b in itertools.combinations(self.steps, 2)
            if a.stage == b.stage and not self.before(a, b) and not self.before(b, a)
        ]


def unordered_pairs(ran: Any, *, loose_ends: bool = False) -> list[tuple[Action, Action]]:
    """Pairs of actions of one stage that the graph leaves unordered.

    Args:
        ran: a `tf_mp.placement.Proof`, a `tf_mp.runs.Run`, or `RunMetadata.function_graphs`.
        loose_ends: see `order_of`.
    """
    return order_of(ran, loose_ends=loose_ends).unordered()


def order_of(ran: Any, *, loose_ends: bool = False) -> Order:
    """The order of the actions of a step.

    Args:
        ran: a `tf_mp.placement.Proof`, a `tf_mp.runs.Run`, or `RunMetadata.function_graphs`.
        loose_ends: leave out operations that wait for fewer actions than others of their action
            (casting labels), and those for which no other action waits (summing a loss that is
            only shown).
    """
    run = getattr(ran, "run", ran)
    run = run if isinstance(run, runs.Run) else runs.read(run)
    groups, ancestors, bit = _graph(run)
    if loose_ends:
        groups = {step: _tied(groups, step, ancestors, bit) for step in groups}
    steps = tuple(sorted(groups))
    members = {step: _union(bit[index] for index in groups[step]) for step in steps}
    common, some = {}, {}
    for step in steps:
        above = [ancestors[index] for index in groups[step]]
        some[step] = _union(above)
        common[step] = _meet(above)
    names = tuple(run.ops[index].name for index in bit)
    return Order(steps, members, common, some, names)


def tied_operations(run: runs.Run) -> dict[Action, set[int]]:
    """For each action its operations in `run.ops` without the loose ends of `order_of`."""
    groups, ancestors, bit = _graph(run)
    return {step: set(_tied(groups, step, ancestors, bit)) for step in groups}


def _graph(run: runs.Run) -> tuple[dict[Action, list[int]], dict[int, int], dict[int, int]]:
    """The operations of each action, the ancestors of each operation, and each one's bit."""
    groups = _actions(run)
    counted = sorted(index for ops in groups.values() for index in ops)
    bit = {index: 1 << place for place, index in enumerate(counted)}
    return groups, _ancestors(run, bit), bit


def _actions(run: runs.Run) -> dict[Action, list[int]]:
    """The operations with a cost of each action that belongs to a micro-batch."""
    groups: dict[Action, list[int]] = {}
    expected = rules.expectations(run, rules.Guess())
    for op in run.ops:
        action = opnames.parse(op.name, op.type)
        if action is None or action.micro_batch is None or action.word == "loss":
            continue
        if rules.is_cheap(op, action, run, expected):
            continue
        step = Action(action.stage, action.micro_batch, _KINDS[action.phase])
        groups.setdefault(step, []).append(op.index)
    return groups


def _tied(
    groups: dict[Action, list[int]], step: Action, ancestors: dict[int, int], bit: dict[int, int]
) -> list[int]:
    """The operations of an action without its loose ends; see `order_of`."""
    members = {other: _union(bit[i] for i in ops) for other, ops in groups.items()}
    above = {
        index: frozenset(o for o in groups if o != step and ancestors[index] & members[o])
        for index in groups[step]
    }
    needed = frozenset().union(*above.values())
    inner = [index for index in groups[step] if above[index] == needed] or groups[step]
    others = [index for other, ops in groups.items() if other != step for index in ops]
    awaited = _union(ancestors[index] for index in others)
    return [index for index in inner if bit[index] & awaited] or inner


def _ancestors(run: runs.Run, bit: dict[int, int]) -> dict[int, int]:
    """For each operation the bit set of the counted operations that it waits for.

    A loop feeds itself through `NextIteration`; the pass is repeated until nothing is added, so
    that what follows a loop waits for all of its body.
    """
    order = rules.topological(run.ops)
    back = [op.index for op in run.ops if op.type == "NextIteration"]
    found: dict[int, int] = {}
    while True:
        before = [found.get(index) for index in back]
        for index in order:
            op = run.ops[index]
            inputs = (*op.inputs, *op.controls)
            found[index] = _union(found.get(i, 0) | bit.get(i, 0) for i in inputs)
        if before == [found.get(index) for index in back]:
            return found


def _union(sets: Iterable[int]) -> int:
    total = 0
    for each in sets:
        total |= each
    return total


def _meet(sets: list[int]) -> int:
    total = sets[0]
    for each in sets[1:]:
        total &= each
    return total
