"""The plan: what a split model will cost in time and memory, before any training.

`forecast.py` measures and predicts, `memory.py` counts bytes; here it is put together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from tf_mp import affinity, cost, forecast, memory, microbatch, schedule, simulate
from tf_mp.memory import StageBytes
from tf_mp.pipeline import Pipeline

__all__ = ["Better", "Plan", "StagePlan", "plan"]

_WORTH = 0.98  # a balance is called better if its step takes at most this share


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        index: Its position, from 0.
        device: Where it lives.
        operations: The names of its operations, in order.
        parameters: Number of trainable parameters that live there.
        forward_ms: Its forward of one micro-batch.
        backward_ms: Its backward of one micro-batch, with the second forward under `recompute`.
        update_ms: Its optimizer step.
        bytes: What it keeps on its device.
        sent_bytes: What one micro-batch sends on to later stages; as much comes back as gradients.
        recompute: Whether the forward is done again in the backward.
        accumulate_ms: Adding the gradients of a micro-batch to those of earlier ones.
    """

    index: int
    device: str
    operations: tuple[str, ...]
    parameters: int
    forward_ms: float
    backward_ms: float
    update_ms: float
    bytes: StageBytes
    sent_bytes: int
    recompute: bool
    accumulate_ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Better:
    """A balance that is predicted to be faster.

    Attributes:
        balance: The number of operations of each stage, ready to paste into `cuts=`.
        step_ms: The predicted step with it.
        speedup_bound: As in `Plan`.
    """

    balance: list[int]
    step_ms: float
    speedup_bound: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that `tf-mp plan` shows.

    Attributes:
        model: The model's name.
        batch_size: Samples of this rank's batch.
        micro_batch_sizes: Samples of each micro-batch.
        schedule: The table of actions.
        stages: The stages.
        devices: The devices, in the order of the schedule's rows.
        simulation: The schedule laid out with the measured times.
        better: A better balance, or None.
    """

    model: str
    batch_size: int
    micro_batch_sizes: tuple[int, ...]
    schedule: schedule.Schedule
    stages: tuple[StagePlan, ...]
    devices: tuple[str, ...]
    simulation: simulate.Simulation
    better: Better | None

    @property
    def step_ms(self) -> float:
        """Predicted time of one step of one rank, without reductions between ranks."""
        return self.simulation.step_ms

    @property
    def bubble(self) -> float:
        """Share of the step in which a device waits, mean over the devices."""
        return self.simulation.bubble

    @property
    def unsplit_ms(self) -> float:
        """All of the work one after another: the step on one device."""
        return sum(self.simulation.busy_ms)

    @property
    def speedup_bound(self) -> float:
        """What the split can gain at most over one device."""
        return simulate.speedup_bound(self.simulation.busy_ms)

    def to_json(self) -> dict[str, Any]:
        """The result of `tf-mp plan --json`; times in ms, sizes in bytes."""
        run = self.simulation
        return {
            "model": self.model,
            "batch_size": self.batch_size,
            "micro_batches": len(self.micro_batch_sizes),
            "micro_batch_sizes": list(self.micro_batch_sizes),
            "schedule": self.schedule.name,
            "step_ms": run.step_ms,
            "bubble": run.bubble,
            "speedup_bound": self.speedup_bound,
            "unsplit_ms": self.unsplit_ms,
            "stages": [_stage_json(stage) for stage in self.stages],
            "devices": [
                {
                    "device": name,
                    "busy_ms": busy,
                    "utilisation": used,
                    "bytes": self._bytes_of(name),
                }
                for name, busy, used in zip(
                    self.devices, run.busy_ms, run.utilisation, strict=True
                )
            ],
            "actions": [
                {**action._asdict(), "start_ms": start, "end_ms": run.end_ms[action]}
                for action, start in sorted(run.start_ms.items(), key=lambda pair: pair[1])
            ],
            "better": None if self.better is None else dataclasses.asdict(self.better),
        }

    def _bytes_of(self, device: str) -> int:
        return sum(stage.bytes.total for stage in self.stages if stage.device == device)


def _stage_json(stage: StagePlan) -> dict[str, Any]:
    parts = {**stage.bytes._asdict(), "total": stage.bytes.total}
    return {**dataclasses.asdict(stage), "operations": list(stage.operations), "bytes": parts}


def plan(
    pipeline: Pipeline,
    batch_size: int,
    *,
    optimizer: keras.optimizers.Optimizer | None = None,
    sample: Sequence[Any] | None = None,
    repeats: int = 5,
) -> Plan:
    """Measures a split model and predicts its step; every rank must call it.

    Args:
        pipeline: The plan of a split model, from `tf_mp.pipeline_of(model)`.
        batch_size: Samples of this rank's batch.
        optimizer: What will train it; by default the model's own, or RMSprop.
        sample: The flat inputs of one micro-batch; made up by default.
        repeats: Runs of each stage, of which the median counts.

    Raises:
        ValueError: for a batch of no samples.
        RuntimeError: on every rank, if measuring failed on the root rank.
    """
    optimizer = optimizer or getattr(pipeline.graph.model, "optimizer", None)
    optimizer = optimizer or keras.optimizers.RMSprop()
    sizes = microbatch.sizes(batch_size, pipeline.micro_batches)
    given = cost.sample_of(pipeline.graph, sizes[0]) if sample is None else sample
    names = tuple(dict.fromkeys(stage.device for stage in pipeline.stages))
    costs = cost.measured(
        pipeline.graph, given, device=names[0], num_devices=len(names), repeats=repeats
    )

    def measure_here() -> forecast.StageTimes:
        cores = affinity.cores_of_device(names[0], 1)
        shared = cores is not None and len(names) > 1
        with affinity.limited_to(cores):
            return forecast.measure_stages(pipeline, given, optimizer, repeats, shared)

    times = forecast.StageTimes(*cost.from_root("the measured times of stages", measure_here))
    table = pipeline.schedule_of(len(sizes))
    in_flight = [table.in_flight_max(stage.index) for stage in pipeline.stages]
    kept = memory.stage_bytes(pipeline, costs, optimizer, in_flight)
    return Plan(
        model=pipeline.graph.model.name,
        batch_size=batch_size,
        micro_batch_sizes=sizes,
        schedule=table,
        stages=tuple(
            _stage_plan(pipeline, k, times, kept[k], memory.sent_bytes(pipeline, costs, k))
            for k in range(len(pipeline.stages))
        ),
        devices=names,
        simulation=(run := forecast.predict(table, times)),
        better=_better(forecast.better_balance(pipeline, costs, table, times), run.step_ms),
    )


def _stage_plan(
    pipeline: Pipeline, k: int, times: forecast.StageTimes, kept: StageBytes, sent_bytes: int
) -> StagePlan:
    own = memory.own_variables(pipeline, k)
    return StagePlan(
        index=k,
        device=pipeline.stages[k].device,
        operations=tuple(operation.name for operation in pipeline.stages[k].operations),
        parameters=sum(v.shape.num_elements() for v in own if v.trainable),
        forward_ms=times.forward_ms[k],
        backward_ms=times.backward_ms[k],
        update_ms=times.update_ms[k],
        bytes=kept,
        sent_bytes=sent_bytes,
        recompute=pipeline.recompute[k],
        accumulate_ms=times.accumulate_ms[k] if times.accumulate_ms else 0.0,
    )


def _better(found: tuple[list[int], float, float] | None, step_ms: float) -> Better | None:
    if found is None or found[1] > _WORTH:
        return None
    balance, share, bound = found
    return Better(balance, share * step_ms, bound)
