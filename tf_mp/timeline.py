"""What really ran when, laid over the plan of the schedule.

Some steps run under TensorFlow's profiler. On a GPU the host's times only show when work was
handed over: there the device's own events are used, and where the profiler has none the times are
marked as the host's.
"""

import dataclasses
import glob
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tf_mp import opnames, probe, runs, xplane
from tf_mp.simulate import Simulation
from tf_mp.spans import STEP, Span, Step, read_steps
from tf_mp.table import Schedule

__all__ = ["Timeline", "measure"]

_WARM_UP_SHARE = 3  # steps under a session that is dropped, for each that counts


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Some measured steps of a split model.

    Attributes:
        devices: the device of each stage.
        schedule: the table that was to be obeyed.
        steps: the measured steps.
        device_times: whether times are of the device; False where a GPU's are of the host.
        clock_ms: median of steps timed without the profiler, just before and after those under
            it; None where none were.
    """

    devices: tuple[str, ...]
    schedule: Schedule
    steps: tuple[Step, ...]
    device_times: bool = True
    clock_ms: float | None = None

    @property
    def typical(self) -> Step:
        """The step of median length."""
        return sorted(self.steps, key=lambda step: step.step_ms)[len(self.steps) // 2]

    @property
    def profiled_ms(self) -> float:
        """Median length of a step under the profiler, which makes each operation a little longer.

        That is up to a quarter of a step of many small operations, such as an LSTM's.
        """
        return statistics.median(step.step_ms for step in self.steps)

    @property
    def step_ms(self) -> float:
        """Median length of a step: the clock's where it is known, else the profiler's."""
        return self.profiled_ms if self.clock_ms is None else self.clock_ms

    def utilisation(self) -> dict[str, float]:
        """For each device the share of time in which it worked, mean over the steps."""
        names = list(dict.fromkeys(self.devices))
        return {d: statistics.fmean(s.utilisation(d) for s in self.steps) for d in names}

    @property
    def bubble(self) -> float:
        """The share of time in which a device waited, mean over devices and steps."""
        return 1 - statistics.fmean(self.utilisation().values())

    def stage_ms(self, name: str) -> list[float]:
        """For each stage the median busy time of its forwards, backwards or update."""
        found: list[float] = []
        for stage in range(len(self.devices)):
            times = [
                span.busy_ms
                for step in self.steps
                for span in step.spans
                if (span.stage, span.name) == (stage, name)
            ]
            found.append(statistics.median(times) if times else 0.0)
        return found

    def disorder(self) -> list[str]:
        """Sentences that say where a step did not follow the schedule's table."""
        found = []
        for number, step in enumerate(self.steps):
            starts = {s.action: s for s in step.spans if s.action is not None}
            for row in self.schedule.by_device:
                for before, after in itertools.pairwise(row):
                    if before in starts and after in starts:
                        late = starts[before].end_ms - starts[after].start_ms
                        if late > 0:
                            found.append(
                                f"step {number}: {after} began {late:.3f} ms before {before} ended"
                            )
        return found

    def in_flight_max(self) -> list[int]:
        """For each stage the most micro-batches whose forward ran and whose backward had not."""
        return [max(_in_flight(step, k) for step in self.steps) for k in range(len(self.devices))]

    def to_json(self, planned: Simulation | None = None) -> dict[str, Any]:
        """The timeline as `tf-mp timeline --json` prints it; times in ms."""
        step = self.typical
        return {
            "step_ms": self.step_ms,
            "profiled_step_ms": self.profiled_ms,
            "predicted_step_ms": planned.step_ms if planned else None,
            "utilisation": self.utilisation(),
            "bubble": self.bubble,
            "in_flight_max": self.in_flight_max(),
            "communication_overlapped": step.overlapped,
            "device_times": self.device_times,
            "disorder": self.disorder(),
            "actions": [_span_json(span, planned) for span in step.spans],
        }


def _span_json(span: Span, planned: Simulation | None) -> dict[str, Any]:
    known = planned is not None and span.action in planned.start_ms
    return {
        "stage": span.stage,
        "action": span.name,
        "micro_batch": span.micro_batch,
        "device": span.device,
        "measured_start_ms": span.start_ms,
        "measured_end_ms": span.end_ms,
        "busy_ms": span.busy_ms,
        "planned_start_ms": planned.start_ms[span.action] if known else None,  # type: ignore
        "planned_end_ms": planned.end_ms[span.action] if known else None,  # type: ignore
    }


def measure(
    model: Any,
    batch: tuple[Any, ...],
    *,
    steps: int = 5,
    warm_up: int = 2,
    log_dir: str | Path | None = None,
) -> Timeline:
    """Runs some training steps under TensorFlow's profiler; the model is left as it was.

    At several ranks every rank must call it.

    Args:
        model: a compiled model that went through `tf_mp.parallelize`.
        batch: ``(x, y)`` or ``(x, y, sample_weight)`` as arrays of one local batch.
        steps: how many steps to measure, and to time before and after without the profiler.
        warm_up: how many to run before; then three for each measured one, under a profiler
            session that is dropped.
        log_dir: where the profiler's own files go (TensorBoard reads them); nowhere by default.
    """
    from tf_mp import pipeline as pipelines

    pipeline = pipelines.pipeline_of(model)
    with probe.unchanged(model, batch[0]), tempfile.TemporaryDirectory() as scratch:
        step = probe.fresh_step(model, batch)
        run = runs.record(step)
        folder = str(log_dir or scratch)
        for _ in range(warm_up):
            step()
        # The first session takes its memory from the system while steps run, which makes steps of
        # many small operations 40 % longer (TensorFlow 2.21); after a longer one it is there.
        _run_profiled(step, _WARM_UP_SHARE * steps, scratch, save=False)
        known = set(_profiles(folder))
        clock = _timed(step, steps)
        _run_profiled(step, steps + 1, folder)
        clock += _timed(step, steps)
        events = [e for f in set(_profiles(folder)) - known for e in xplane.profiler_events(f)]
    found, device_times = read_steps(events, run)
    found = found[1:]  # the first of a session is 5 to 10 % longer
    micro_batches = 1 + max(
        (s.micro_batch for each in found for s in each.spans if s.micro_batch is not None),
        default=0,
    )
    devices = tuple(stage.device for stage in pipeline.stages)
    table = pipeline.schedule_of(micro_batches)
    return Timeline(devices, table, tuple(found), device_times, statistics.median(clock))


def _timed(step: Callable[[], Any], steps: int) -> list[float]:
    """Milliseconds of each of some steps."""
    found = []
    for _ in range(steps):
        start = time.perf_counter()
        _finish(step())
        found.append((time.perf_counter() - start) * 1e3)
    return found


def _run_profiled(step: Callable[[], Any], steps: int, folder: str, *, save: bool = True) -> None:
    import tensorflow as tf

    tf.profiler.experimental.start(folder)
    try:
        for number in range(steps):
            with tf.profiler.experimental.Trace(STEP, step_num=number, _r=1):
                _finish(step())
    finally:
        tf.profiler.experimental.stop(save=save)


def _in_flight(step: Step, stage: int) -> int:
    spans = [s for s in step.spans if s.stage == stage and s.action is not None]
    changes = sorted((s.end_ms, 1) if s.name == opnames.FORWARD else (s.end_ms, -1) for s in spans)
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _profiles(folder: str) -> list[str]:
    return glob.glob(f"{folder}/plugins/profile/*/*.xplane.pb")


def _finish(result: Any) -> None:
    """Waits until a step's results are there: on a GPU the call returns before."""
    import tensorflow as tf

    for value in tf.nest.flatten(result):
        value.numpy()
