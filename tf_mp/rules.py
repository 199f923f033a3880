"""Rules of the proof: what each operation belongs to, and what may run anywhere."""

import dataclasses
from collections.abc import Callable, Sequence

from tf_mp import opnames, runs

__all__ = [
    "BOOKKEEPING",
    "INPUTS",
    "LIGHT",
    "SCALARS",
    "Expectations",
    "Guess",
    "expectations",
    "heavy_group",
    "is_cheap",
    "reason_to_run_anywhere",
    "topological",
    "transfer_kind",
]

BOOKKEEPING = "constants, arguments and control edges"
INPUTS = "the input pipeline"
SCALARS = "scalars and shapes elsewhere"
LIGHT = "reads, views and scalars in their place"

_BOOKKEEPING_TYPES = frozenset(
    "Const _HostConst _Arg _Retval _DeviceArg _DeviceRetval _Send _Recv _HostSend _HostRecv NoOp "
    "ControlTrigger VarHandleOp VarIsInitializedOp Placeholder".split()
)
_INPUT_TYPES = frozenset(
    "IteratorGetNext IteratorGetNextAsOptional IteratorV2 AnonymousIteratorV3 MakeIterator "
    "OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone".split()
)
_SHAPE_TYPES = frozenset("Shape ShapeN Size Rank".split())
_VIEW_TYPES = frozenset("Identity IdentityN StopGradient PreventGradient ReadVariableOp".split())
# A loop's bookkeeping: it hands tensors on, by reference.
_LOOP_TYPES = frozenset(
    "Enter Exit Merge Switch NextIteration LoopCond EmptyTensorList TensorListReserve "
    "TensorListPushBack TensorListPopBack TensorListElementShape TensorListLength".split()
)
# What cuts a batch into micro-batches: it moves numbers and computes nothing from them.
_MOVING_TYPES = _VIEW_TYPES | frozenset(
    "Split SplitV Slice StridedSlice Cast Reshape ExpandDims Squeeze ConcatV2 Pack Unpack "
    "GatherV2 Transpose Pad Range".split()
)
_LARGEST_SHAPE = 8


@dataclasses.dataclass(frozen=True)
class Guess:
    """What to expect of operations whose name holds no stage scope.

    Attributes:
        stage_of_device: the stage of an argument that is a variable, by the variable's device;
            empty when stage scopes are expected around everything that reads variables.
        optimizer: the name scope of the optimizer, "" when it runs inside stage opnames.
    """

    stage_of_device: Callable[[str], int | None] = lambda device: None
    optimizer: str = ""

    def phase(self, name: str, inherited: str) -> str:
        """The phase of an operation, by its name or else by its inputs."""
        words = name.split("/")
        if self.optimizer and any(
            word == self.optimizer or opnames.is_numbered(word, self.optimizer) for word in words
        ):
            return opnames.OPTIMIZER
        if opnames.is_gradient(name):
            return opnames.BACKWARD
        return inherited


@dataclasses.dataclass(frozen=True)
class Expectations:
    """For each operation: its action, and whether it depends on the batch alone."""

    actions: tuple[opnames.Action | None, ...]
    batch_only: tuple[bool, ...]


def expectations(run: runs.Run, guess: Guess) -> Expectations:
    """What each operation belongs to: by its name, else by its inputs where they agree."""
    actions: list[opnames.Action | None] = [None] * len(run.ops)
    batch_only = [False] * len(run.ops)
    for index in topological(run.ops):
        op = run.ops[index]
        action = opnames.parse(op.name, op.type)
        actions[index] = action or _inherited(op, run, actions, guess)
        batch_only[index] = op.type == "Const" or (
            action is None and not op.variable and all(batch_only[i] for i in op.inputs)
        )
    return Expectations(tuple(actions), tuple(batch_only))


def reason_to_run_anywhere(
    op: runs.Op, action: opnames.Action | None, run: runs.Run, expected: Expectations
) -> str | None:
    """Why an operation may run on any device, None when it may not."""
    if op.type in _BOOKKEEPING_TYPES:
        return BOOKKEEPING
    if op.type in _INPUT_TYPES:
        return INPUTS
    if _is_small(op, run):
        return SCALARS
    unscoped = action is None or not action.word
    if unscoped and (op.type in _VIEW_TYPES or _sets_from_outside(op, run)):
        return BOOKKEEPING
    if action is not None:
        return None
    if op.kind in _MOVING_TYPES or op.type in _MOVING_TYPES:
        return INPUTS if expected.batch_only[op.index] else None
    return None


def is_cheap(
    op: runs.Op, action: opnames.Action | None, run: runs.Run, expected: Expectations
) -> bool:
    """Whether an operation takes no time worth ordering: reading a variable, views, scalars."""
    if op.type in _VIEW_TYPES or op.type in _LOOP_TYPES:
        return True
    return reason_to_run_anywhere(op, action, run, expected) is not None


def transfer_kind(transfer: runs.Transfer, run: runs.Run, expected: Expectations) -> str:
    """What crosses: see `tf_mp.placement.Crossing`."""
    op = run.ops[transfer.source]
    if "/ctrl/" in op.name or transfer.num_bytes == 0:
        return "control"
    if op.elements is not None and op.elements <= 1:
        return "scalar"
    if expected.batch_only[op.index] and op.type != "Const":
        return "data"
    if _few(op):
        return "scalar"
    if _reads_variable(op, run):
        return "weight"
    action = expected.actions[op.index]
    if action is None:
        return "other"
    return {
        opnames.FORWARD: "activation",
        opnames.BACKWARD: "gradient",
        opnames.OPTIMIZER: "update",
        opnames.COLLECTIVE: "update",
    }[action.phase]


def heavy_group(kind: str) -> str | None:
    """The group in which a kind of operation is shown by itself, None for the light ones."""
    if kind.startswith(("Conv", "DepthwiseConv")):
        return "convolution"
    if "MatMul" in kind or kind == "Einsum":
        return "MatMul"
    return None


def topological(ops: Sequence[runs.Op]) -> list[int]:
    """Positions of operations, each after its inputs; loops are cut at `NextIteration`."""
    waiting = [0] * len(ops)
    readers: list[list[int]] = [[] for _ in ops]
    for op in ops:
        for i in (*op.inputs, *op.controls):
            if ops[i].type != "NextIteration":
                waiting[op.index] += 1
                readers[i].append(op.index)
    ready = [op.index for op in ops if not waiting[op.index]]
    for index in ready:
        for reader in readers[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    assert len(ready) == len(ops), "a graph that ran has no cycle outside its loops"
    return ready


def _inherited(
    op: runs.Op, run: runs.Run, actions: Sequence[opnames.Action | None], guess: Guess
) -> opnames.Action | None:
    """The action of an operation without a stage scope: that of its inputs if they agree.

    Constants do not count, as equal ones of several stages are merged into one. Scalars do not
    count as long as there is something larger: a learning rate is everybody's.
    """
    if op.variable:
        stage = guess.stage_of_device(op.device)
        return None if stage is None else opnames.Action(stage, opnames.FORWARD, None, "", op.name)
    known = [i for i in op.inputs if actions[i] is not None and run.ops[i].type != "Const"]
    large = [i for i in known if not _few(run.ops[i]) and not run.ops[i].variable]
    above = [action for i in large or known if (action := actions[i]) is not None]
    if len({action.stage for action in above}) != 1:
        return None
    inherited = max((action.phase for action in above), key=opnames.PHASES.index)
    return opnames.Action(above[0].stage, guess.phase(op.name, inherited), None, "", op.name)


def _is_small(op: runs.Op, run: runs.Run) -> bool:
    """Whether an operation reads and makes scalars and shapes only."""
    if not _few(op):
        return False
    if op.type in _SHAPE_TYPES:
        return True
    return all(_few(run.ops[i]) or run.ops[i].variable for i in op.inputs)


def _sets_from_outside(op: runs.Op, run: runs.Run) -> bool:
    """Whether an operation gives a variable a value that no step computed: its first one."""
    inputs = {run.ops[i].type for i in op.inputs}
    return op.type == "AssignVariableOp" and inputs <= {"_Arg", "Const"}


def _few(op: runs.Op) -> bool:
    """Whether an operation makes a scalar or a shape, and no more."""
    return op.elements is not None and op.elements <= (_LARGEST_SHAPE if op.integer else 1)


def _reads_variable(op: runs.Op, run: runs.Run) -> bool:
    while op.type in ("Identity", "Cast") and op.inputs:
        op = run.ops[op.inputs[0]]
    return op.type == "ReadVariableOp"
