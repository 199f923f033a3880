"""The gradients of one stage over all ranks: by the optimizer's own rule, where it may run."""

from collections.abc import Sequence
from typing import Any

from tf_mp import recording, update
from tf_mp.engine import Engine
from tf_mp.stage import Stage

__all__ = ["place_of", "reduced"]


def reduced(engine: Engine, optimizer: Any, share: update.Share) -> update.Share:
    """A stage's share of the step with its gradients reduced; itself where nothing reduces.

    Args:
        engine: What runs the step.
        optimizer: The compiled optimizer; one of `tf_mp.hvd` has `reduce_gradients`, also where
            Keras has wrapped it.
        share: The gradients of one stage, accumulated over the micro-batches.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    reduce = getattr(optimizer, "reduce_gradients", None)
    reduce = reduce or getattr(inner, "reduce_gradients", None)
    present = [j for j, g in enumerate(share.gradients) if g is not None]
    if reduce is None or not present:
        return share
    stage = place_of(engine.stages[share.index], engine.stages)
    with engine.place(stage, "reduce"):
        made = reduce([share.gradients[j] for j in present], [share.variables[j] for j in present])
    gradients: list[Any] = [None] * len(share.gradients)
    for j, gradient in zip(present, made, strict=True):
        gradients[j] = gradient
    return update.Share(share.index, share.device, gradients, share.variables)


def place_of(stage: Stage, stages: Sequence[Stage]) -> Stage:
    """The stage on whose device, and in whose name, a stage's gradients are reduced.

    Its own; but where `tf_mp.hvd` sends all reductions of a process through one GPU, a stage that
    lies there.
    """
    from tf_mp import hvd

    wanted = recording.device_index(hvd.reduction.device_of(stage.device))
    there = (s for s in stages if recording.device_index(s.device) == wanted)
    return next(there, stage)
