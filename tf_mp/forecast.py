"""From measured times to a predicted step, and to a balance that would be faster.

Each stage is timed on its device with one micro-batch, and its optimizer step once; the schedule
is simulated with these times. CPU devices share cores, so there each stage is timed while the
other devices work, too. A better balance is looked for with the times of single
operations. It is judged against the present one by the same times, and only the ratio is used:
operations that TensorFlow fuses take less together than alone.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from tf_mp import company, cost, memory, partition, simulate, timing
from tf_mp.cost import OperationCost
from tf_mp.pipeline import Pipeline
from tf_mp.schedule import Schedule

__all__ = ["StageTimes", "better_balance", "measure_stages", "predict"]

_COMPANY_MS = 200.0  # a stage is timed beside others for so long: they meet by chance
_MOST_TURNS = 40


class StageTimes(NamedTuple):
    """Measured milliseconds, one number a stage (a boundary for `transfer_ms`).

    Attributes:
        forward_ms: The forward of one micro-batch.
        backward_ms: The backward of one micro-batch, a second forward included if it is redone.
        update_ms: The optimizer step.
        transfer_ms: What one micro-batch sends to the next stage.
        alone_ms: Forward, backward, update and accumulation once more, while all other devices
            wait; None where devices do not share cores.
        accumulate_ms: Adding the gradients of one micro-batch to those before it; None for 0.
        lead_in_ms: What handing over the arguments of a step takes, as the calls of its stages do.
    """

    forward_ms: list[float]
    backward_ms: list[float]
    update_ms: list[float]
    transfer_ms: list[float]
    alone_ms: list[list[float]] | None = None
    accumulate_ms: list[float] | None = None
    lead_in_ms: float = 0.0


def measure_stages(
    pipeline: Pipeline,
    sample: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
    repeats: int = 5,
    shared: bool = False,
) -> StageTimes:
    """Times every stage on its device, on this rank.

    Args:
        pipeline: The plan of a split model.
        sample: Its flat inputs for one micro-batch, (micro_batch, ...) each, or None.
        optimizer: What will train it.
        repeats: Runs of each, of which the median counts.
        shared: Whether devices share cores: then a stage is timed while the other devices work,
            and once more while they wait.
    """
    needed = cost.needs_gradient(pipeline.graph)
    inputs = zip(pipeline.graph.inputs, sample, strict=True)
    values = {key: (tensor, None) for key, tensor in inputs}
    timed, transfer_ms = [], []
    for stage in pipeline.stages:
        pairs = [values[key] for key in stage.inputs]
        run = timing.StageRun(stage, [t for t, _ in pairs], [m for _, m in pairs])
        trained = [v for v in memory.own_variables(pipeline, stage.index) if v.trainable]
        timed.append(
            _Timed(
                run,
                [key in needed for key in stage.inputs],
                timing.update_function(optimizer, trained, stage.device) if trained else None,
                pipeline.recompute[stage.index],
            )
        )
        made = zip(run.outputs, run.masks, strict=True)
        values.update(zip(stage.outputs, made, strict=True))
        if stage.index + 1 < len(pipeline.stages):
            sent = sum(cost.num_bytes(tensor) for tensor in run.outputs)
            rate = timing.time_transfer(
                stage.device, pipeline.stages[stage.index + 1].device, repeats
            )
            transfer_ms.append(sent * rate)
    alone = [each.alone(repeats) for each in timed]
    forward, backward, update, accumulate, calls = _columns(alone)
    lead_in_ms = sum(calls)
    if not shared:
        return StageTimes(
            forward, backward, update, transfer_ms, None, accumulate, lead_in_ms
        )
    crowded = []
    for stage, each, own in zip(pipeline.stages, timed, alone, strict=True):
        with company.at_work(_loads(pipeline, timed, stage.device)):
            crowded.append(each.beside_others(own, repeats))
    alone_ms = [forward, backward, update, accumulate]
    forward, backward, update, accumulate, _ = _columns(crowded)
    return StageTimes(
        forward, backward, update, transfer_ms, alone_ms, accumulate, lead_in_ms
    )


class _StageMs(NamedTuple):
    """Milliseconds of a stage, and those of a call, which are in none of them."""

    forward: float
    backward: float
    update: float
    accumulate: float
    call: float


class _Timed(NamedTuple):
    """A stage that is ready to be timed."""

    run: timing.StageRun
    wanted: list[bool]
    update: Callable[[], Any] | None
    again: bool

    def alone(self, repeats: int) -> _StageMs:
        """While the other devices wait."""
        times = self.run.times_ms(self.wanted, repeats, statistics.median)
        added = self.run.accumulate_ms(self.wanted, repeats, statistics.median)
        return self._made(times, self._update_ms(repeats), added)

    def beside_others(self, alone: _StageMs, repeats: int) -> _StageMs:
        """While they work; no less than alone."""
        both_ms = alone.forward + alone.backward + alone.call
        turns = max(repeats, min(_MOST_TURNS, math.ceil(_COMPANY_MS / max(both_ms, 1.0))))
        times = self.run.times_ms(self.wanted, turns, statistics.median)
        added = self.run.accumulate_ms(self.wanted, turns, statistics.median)
        made = self._made(times, self._update_ms(turns), added)
        return _StageMs(*map(max, made, alone))

    def _update_ms(self, repeats: int) -> float:
        if not self.update:
            return 0.0
        return timing.time_functions([self.update], repeats, statistics.median)[0]

    def _made(self, times: timing.Times, update_ms: float, accumulate_ms: float) -> _StageMs:
        forward_ms, backward_ms, call_ms = times
        backward_ms += forward_ms if self.again else 0.0
        return _StageMs(forward_ms, backward_ms, update_ms, accumulate_ms, call_ms)


def _columns(rows: Sequence[_StageMs]) -> list[list[float]]:
    """For forward, backward, update, accumulation and call one number a stage."""
    return [list(column) for column in zip(*rows, strict=True)]


def _loads(
    pipeline: Pipeline, timed: Sequence[_Timed], device: str
) -> list[Callable[[], object]]:
    """For each device but one a function that runs its stages once."""
    by_device: dict[str, list[Callable[[], object]]] = {}
    for stage, each in zip(pipeline.stages, timed, strict=True):
        if stage.device != device:
            by_device.setdefault(stage.device, []).append(each.run.load(each.wanted))
    return [lambda own=own: [run() for run in own] for own in by_device.values()]  # type: ignore


def predict(table: Schedule, times: StageTimes) -> simulate.Simulation:
    """The schedule laid out with measured times.

    The first micro-batch of a stage has no sums to be added to: of m backwards m - 1 accumulate.
    """
    share = 1 - 1 / table.num_micro_batches

    def backward(own: Sequence[float], accumulate: Sequence[float] | None) -> list[float]:
        added = accumulate or [0.0] * len(own)
        return [ms + share * more for ms, more in zip(own, added, strict=True)]

    alone_ms = None
    if times.alone_ms is not None:
        forward, backward_ms, update, accumulate = times.alone_ms
        alone_ms = [forward, backward(backward_ms, accumulate), update]
    return simulate.simulate(
        table,
        times.forward_ms,
        backward_ms=backward(times.backward_ms, times.accumulate_ms),
        update_ms=times.update_ms,
        transfer_ms=times.transfer_ms,
        alone_ms=alone_ms,
        lead_in_ms=times.lead_in_ms,
    )


def better_balance(
    pipeline: Pipeline, costs: Sequence[OperationCost], table: Schedule, times: StageTimes
) -> tuple[list[int], float, float] | None:
    """The balance with the fastest predicted step, if it differs from the present cut.

    Args:
        pipeline: The plan of a split model.
        costs: The measured operations, in the graph's order.
        table: The schedule.
        times: The measured stages.

    Returns:
        The balance, the share of the present step that it takes, and its bound on the speed-up;
        None if the present cut is that balance already.
    """
    count, graph = len(pipeline.stages), pipeline.graph
    weight_bytes = sum(entry.weight_bytes for entry in costs)
    rate = sum(times.update_ms) / weight_bytes if weight_bytes else 0.0
    added = sum(times.accumulate_ms or ()) / weight_bytes if weight_bytes else 0.0
    m = table.num_micro_batches
    rows = [
        row._replace(
            cost_ms=row.cost_ms + (rate / m + added * (m - 1) / m) * row.weight_bytes
        )
        for row in cost.as_balance(graph, costs)
    ]
    found = partition.automatic(rows, count)
    place = {id(operation): i for i, operation in enumerate(graph.operations)}
    present = [[place[id(op)] for op in stage.operations] for stage in pipeline.stages]
    if present == [list(stage) for stage in found.stages]:
        return None

    def simulated(groups: Sequence[Sequence[int]]) -> simulate.Simulation:
        own = [[costs[i] for i in group] for group in groups]
        again = pipeline.recompute
        forward = [sum(entry.forward_ms for entry in group) for group in own]
        backward = [sum(entry.backward_ms for entry in group) for group in own]
        backward = [b + f * a for b, f, a in zip(backward, forward, again, strict=True)]
        sizes = [sum(entry.weight_bytes for entry in group) for group in own]
        update, accumulate = ([per * size for size in sizes] for per in (rate, added))
        return predict(
            table,
            StageTimes(forward, backward, update, times.transfer_ms, None, accumulate),
        )

    before, after = simulated(present), simulated(found.stages)
    share = after.step_ms / before.step_ms if before.step_ms else 1.0
    return found.balance, share, simulate.speedup_bound(after.busy_ms)
