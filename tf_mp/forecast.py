"""From measured times to a predicted step, and to a balance that would be faster.

Each stage is timed alone on its device with one micro-batch, and its optimizer step once; the
schedule is simulated with these times. A better balance is looked for with the times of single
operations. It is judged against the present one by the same times, and only the ratio is used:
operations that TensorFlow fuses take less together than alone.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tf_mp import affinity, cost, memory, partition, simulate, timing
from tf_mp.cost import OperationCost
from tf_mp.pipeline import Pipeline
from tf_mp.schedule import Schedule

__all__ = ["StageTimes", "better_balance", "measure_stages", "predict"]


class StageTimes(NamedTuple):
    """Measured milliseconds, one number a stage (a boundary for `transfer_ms`).

    Attributes:
        forward_ms: The forward of one micro-batch.
        backward_ms: The backward of one micro-batch, a second forward included if it is redone.
        update_ms: The optimizer step.
        transfer_ms: What one micro-batch sends to the next stage.
        alone_ms: The first three once more, while all other devices wait; None where devices do
            not share cores.
    """

    forward_ms: list[float]
    backward_ms: list[float]
    update_ms: list[float]
    transfer_ms: list[float]
    alone_ms: list[list[float]] | None = None


def measure_stages(
    pipeline: Pipeline,
    sample: Sequence[Any],
    optimizer: keras.optimizers.Optimizer,
    repeats: int = 5,
    num_cores: int | None = None,
) -> StageTimes:
    """Times every stage on its device, on this rank.

    Args:
        pipeline: The plan of a split model.
        sample: Its flat inputs for one micro-batch, (micro_batch, ...) each, or None.
        optimizer: What will train it.
        repeats: Runs of each, of which the median counts.
        num_cores: The cores that a device has while all of them work; None: as many as alone.
    """
    needed = cost.needs_gradient(pipeline.graph)
    inputs = zip(pipeline.graph.inputs, sample, strict=True)
    values = {key: (tensor, None) for key, tensor in inputs}
    times = StageTimes([], [], [], [], None if num_cores is None else [[], [], []])
    for stage in pipeline.stages:
        pairs = [values[key] for key in stage.inputs]
        run = timing.StageRun(stage, [t for t, _ in pairs], [m for _, m in pairs])
        wanted = [key in needed for key in stage.inputs]
        trained = [v for v in memory.own_variables(pipeline, stage.index) if v.trainable]
        update = timing.update_function(optimizer, trained, stage.device) if trained else None
        again = pipeline.recompute[stage.index]
        with affinity.limited_to(num_cores):
            crowded = _timed(run, wanted, update, again, repeats)
        for row, value in zip(times[:3], crowded, strict=True):
            row.append(value)
        if times.alone_ms is not None:
            alone = _timed(run, wanted, update, again, repeats)
            for row, value, most in zip(times.alone_ms, alone, crowded, strict=True):
                row.append(min(value, most))
        made = zip(run.outputs, run.masks, strict=True)
        values.update(zip(stage.outputs, made, strict=True))
        if stage.index + 1 < len(pipeline.stages):
            sent = sum(cost.num_bytes(tensor) for tensor in run.outputs)
            rate = timing.time_transfer(
                stage.device, pipeline.stages[stage.index + 1].device, repeats
            )
            times.transfer_ms.append(sent * rate)
    return times


def _timed(
    run: timing.StageRun, wanted: Sequence[bool], update: Any, again: bool, repeats: int
) -> tuple[float, float, float]:
    """Forward, backward and update of a stage in ms, on the cores that this process now has."""
    forward_ms, backward_ms = run.times_ms(wanted, repeats, statistics.median)
    update_ms = timing.time_functions([update], repeats, statistics.median)[0] if update else 0.0
    return forward_ms, backward_ms + (forward_ms if again else 0.0), update_ms


def predict(table: Schedule, times: StageTimes) -> simulate.Simulation:
    """The schedule laid out with measured times."""
    return simulate.simulate(
        table,
        times.forward_ms,
        backward_ms=times.backward_ms,
        update_ms=times.update_ms,
        transfer_ms=times.transfer_ms,
        alone_ms=times.alone_ms,
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
    rows = [
        row._replace(cost_ms=row.cost_ms + rate * row.weight_bytes / table.num_micro_batches)
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
        update = [rate * sum(entry.weight_bytes for entry in group) for group in own]
        return predict(table, StageTimes(forward, backward, update, times.transfer_ms))

    before, after = simulated(present), simulated(found.stages)
    share = after.step_ms / before.step_ms if before.step_ms else 1.0
    return found.balance, share, simulate.speedup_bound(after.busy_ms)
