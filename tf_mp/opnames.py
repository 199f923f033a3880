"""Names of operations: which stage and which action an operation says that it belongs to.

The pipeline opens a name scope for each action (``stage_0/forward_2``, ``stage_1/update``, ...).
TensorFlow keeps it in the name of every operation made there, also after it has inlined functions,
taken gradients and optimised the graph; then more words stand before and after. The outermost
scope decides: ``stage_1/backward_0/gradient_tape/stage_1/forward_0/MatMul`` belongs to a backward.
"""

import re
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "COLLECTIVE",
    "FORWARD",
    "OPTIMIZER",
    "PHASES",
    "Action",
    "is_gradient",
    "is_numbered",
    "parse",
    "scope",
]

FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE = "forward", "backward", "optimizer", "collective"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE)
_PHASE_OF_WORD = {
    "forward": FORWARD,
    "loss": FORWARD,
    "metrics": FORWARD,
    "backward": BACKWARD,
    "reduce": COLLECTIVE,
    "update": OPTIMIZER,
}
# A second `_1` is TensorFlow's, which numbers a scope that is opened twice.
_SCOPE = re.compile(
    rf"(?:^|/)stage_(\d+)(?:_\d+)?/({'|'.join(_PHASE_OF_WORD)})(?:_(\d+))?(?:_\d+)?(?=$|[/:-])"
)
_COLLECTIVE_TYPE = re.compile(r"^(Horovod|Collective|Nccl)")
_GRADIENT = re.compile(r"(^|/)(gradient_tape|gradients)(_\d+)?/")


class Action(NamedTuple):
    """What an operation belongs to, read from its name.

    Attributes:
        stage: index of the stage.
        phase: one of `PHASES`; loss and metrics are part of the forward.
        micro_batch: index of the micro-batch, None for what is done once a step.
        word: the scope's own word: forward, loss, metrics, backward, reduce or update.
        rest: the name within the action, for people.
    """

    stage: int
    phase: str
    micro_batch: int | None
    word: str
    rest: str


def scope(stage: int, word: str, micro_batch: int | None = None) -> str:
    """The name scope of an action.

    >>> scope(1, "forward", 0)
    'stage_1/forward_0'
    """
    return (
        f"stage_{stage}/{word}" if micro_batch is None else f"stage_{stage}/{word}_{micro_batch}"
    )


def parse(name: str, op_type: str = "") -> Action | None:
    """The action that an operation's name tells, None when it has no stage scope.

    >>> parse("StatefulPartitionedCall/stage_1/backward_0/gradient_tape/stage_1/forward_0/mul")
    Action(stage=1, phase='backward', micro_batch=0, word='backward', rest='mul')
    """
    match = _SCOPE.search(name)
    if match is None:
        return None
    word, phase = match[2], _PHASE_OF_WORD[match[2]]
    if phase == FORWARD and is_gradient(name[: match.start() + 1]):
        phase = BACKWARD
    if _COLLECTIVE_TYPE.match(op_type):
        phase = COLLECTIVE
    micro_batch = int(match[3]) if match[3] and word in ("forward", "backward", "loss") else None
    inner = list(_SCOPE.finditer(name))[-1]
    return Action(int(match[1]), phase, micro_batch, word, name[inner.end() :].lstrip("/"))


def is_gradient(name: str) -> bool:
    """Whether an operation was made by a gradient tape, by its name."""
    return _GRADIENT.search(name) is not None


def is_numbered(word: str, name: str) -> bool:
    """Whether `word` is `name` as TensorFlow numbers it: `conv_1` for `conv`.

    >>> is_numbered("conv_1", "conv"), is_numbered("conv", "conv")
    (True, False)
    """
    return re.fullmatch(re.escape(name) + r"_\d+", word) is not None
