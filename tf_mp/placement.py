"""The proof: every operation that ran, held against the stage that its name belongs to.

An operation's *expected* device comes from the name scope in which it was made (`tf_mp.scopes`),
never from its device: so the proof cannot agree with itself. Operations without such a scope, made
by TensorFlow's graph optimiser or by Keras around the stages, are expected where their inputs are.
What could not be read is never taken as right: it is a problem, and the proof is not `ok`.

These may run anywhere, and are counted by their reason in `Proof.excused`:

- bookkeeping without work: constants, arguments, results, control edges, the transfers themselves;
- the input pipeline: taking the batch from its iterator, and cutting it into micro-batches;
- scalars, and integer vectors of at most eight entries: counters, shapes, seeds, learning rates.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from tf_mp import opnames, probe, rules, runs
from tf_mp.proof import Crossing, Proof, Stray

__all__ = ["Crossing", "Proof", "Stray", "judge", "verify_placement"]


def judge(
    run: runs.Run,
    devices: Sequence[str],
    *,
    layers: Iterable[Iterable[str]] = (),
    guess: rules.Guess | None = None,
    phases: Iterable[str] = (opnames.FORWARD,),
) -> Proof:
    """Holds every operation of a run against the stage that it belongs to.

    Args:
        run: what ran.
        devices: the device of each stage, in the order of the stages.
        layers: names of the layers of each stage, to name the layer of a stray.
        guess: what to expect of operations without a stage scope; by their inputs by default.
        phases: what each stage must have run at least one operation of.
    """
    devices = tuple(runs.device_name(device) for device in devices)
    names = tuple(tuple(stage) for stage in layers)
    expected = rules.expectations(run, guess or rules.Guess())
    counts: collections.Counter[tuple[int, str, str, str]] = collections.Counter()
    excused: collections.Counter[str] = collections.Counter()
    strays: list[tuple[bool, bool, Stray]] = []
    problems = []
    for op, action in zip(run.ops, expected.actions, strict=True):
        if op.calls:
            problems.append(f"the body of {op.calls[0]}, called by {op.name}, was not read")
            continue
        reason = rules.reason_to_run_anywhere(op, action, run, expected)
        if reason in (rules.BOOKKEEPING, rules.INPUTS):
            excused[reason] += 1
            continue
        home = None
        if action is not None and action.stage < len(devices):
            home = devices[action.stage]
        if home != op.device and reason is not None:
            excused[reason] += 1
            continue
        if action is not None and not rules.is_cheap(op, action, run, expected):
            counts[action.stage, action.phase, op.kind, op.device] += 1
        elif home == op.device:
            excused[rules.LIGHT] += 1
        if home != op.device:
            stray = Stray(op.name, home or "no stage", op.device, _layer(op, names))
            strays.append((rules.heavy_group(op.kind) is None, stray.layer == "", stray))
    problems += _missing(counts, len(devices), phases)
    crossings = tuple(_crossing(t, run, expected) for t in run.transfers)
    # The heaviest first, then those with a layer: what a person looks for.
    ordered = tuple(stray for *_, stray in sorted(strays, key=lambda entry: entry[:2]))
    return Proof(devices, names, counts, ordered, crossings, excused, tuple(problems), run)


def verify_placement(model: Any, batch: tuple[Any, ...], *, step: str = "train") -> Proof:
    """Proves where a split model computes, by running one step and reading what ran.

    The model's weights, optimizer, metrics and seeds are afterwards as before. At several ranks
    every rank must call it.

    Args:
        model: a compiled model that went through `tf_mp.parallelize`.
        batch: ``(x, y)`` or ``(x, y, sample_weight)`` as arrays of one local batch.
        step: "train", "test" or "predict".

    Returns:
        The proof; `Proof.raise_for_strays` makes an error of a stray.

    Raises:
        ValueError: the model is not split, not compiled or runs eagerly.
    """
    from tf_mp import pipeline, world

    stages = pipeline.pipeline_of(model).stages
    run = probe.run_step(model, batch, step=step)
    layers = [[operation_name(op) for op in stage.operations] for stage in stages]
    proof = judge(run, [stage.device for stage in stages], layers=layers)
    problems = list(proof.problems)
    if step == "train":
        problems += _untrained(proof, stages, world.current().size)
    strays = [*proof.strays, *_stray_variables(model, stages)]
    return dataclasses.replace(proof, strays=tuple(strays), problems=tuple(problems))


def operation_name(operation: Any) -> str:
    """The name of an operation of a stage, whether it is a layer or what holds one."""
    return str(getattr(operation, "name", operation))


def _untrained(proof: Proof, stages: Sequence[Any], world_size: int) -> list[str]:
    """What a training step must have run: a backward, an update and, with ranks, a reduction."""
    needed = [opnames.BACKWARD, opnames.OPTIMIZER]
    found = []
    for stage in stages:
        if any(variable.trainable for variable in stage.variables):
            found += _missing(proof.counts, stage.index + 1, needed, first=stage.index)
    reductions = any(phase == opnames.COLLECTIVE for _, phase, _, _ in proof.counts)
    if world_size > 1 and not reductions:
        found.append(f"no gradient was reduced over the {world_size} ranks")
    return found


def _stray_variables(model: Any, stages: Sequence[Any]) -> list[Stray]:
    """Variables and optimizer slots whose storage is not on their stage's device."""
    optimizer = getattr(model, "optimizer", None)
    slots: dict[str, list[Any]] = {}
    for slot in optimizer.variables if optimizer is not None else ():
        slots.setdefault(slot.path.partition("/")[2], []).append(slot)
    found: list[Stray] = []
    seen: set[int] = set()
    for stage in stages:
        home = runs.device_name(stage.device)
        # A variable that several stages use lives in the first of them.
        own = [variable for variable in stage.variables if id(variable) not in seen]
        seen.update(map(id, own))
        for variable in own:
            prefix = variable.path.replace("/", "_") + "_"
            owned = [v for path, vs in slots.items() if path.startswith(prefix) for v in vs]
            for each in [variable, *owned]:
                actual = runs.device_name(each.value.device)
                if actual != home and each.shape.num_elements() != 1:
                    layer = variable.path.rpartition("/")[0]
                    found.append(Stray(f"variable {each.path}", home, actual, layer))
    return found


def _missing(
    counts: Iterable[tuple[int, str, str, str]],
    num_stages: int,
    phases: Iterable[str],
    *,
    first: int = 0,
) -> list[str]:
    """A sentence for each stage and phase of which nothing ran, or nothing was read."""
    seen = {(stage, phase) for stage, phase, _, _ in counts}
    return [
        f"no {phase} operation of stage {stage} was found"
        for stage in range(first, num_stages)
        for phase in phases
        if (stage, phase) not in seen
    ]


def _layer(op: runs.Op, layers: tuple[tuple[str, ...], ...]) -> str:
    """The layer whose name is a word of the operation's name; longest first."""
    words = op.name.split("/")
    names = sorted({name for stage in layers for name in stage}, key=len, reverse=True)
    exact = [name for name in names if name in words]
    numbered = [name for name in names if any(opnames.is_numbered(word, name) for word in words)]
    return next(iter([*exact, *numbered]), "")


def _crossing(transfer: runs.Transfer, run: runs.Run, expected: rules.Expectations) -> Crossing:
    op = run.ops[transfer.source]
    kind = rules.transfer_kind(transfer, run, expected)
    return Crossing(op.name, transfer.sender, transfer.receiver, transfer.num_bytes, kind)
