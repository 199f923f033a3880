"""What a person sees of a training run: a line with the loss, the speed and the time left."""

import math
import statistics
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf

from tf_mp import evaluation, world

__all__ = ["Progress"]

_CELLS = 20


class Progress(keras.callbacks.Callback):
    """Reports the mean loss and metrics of all ranks every few steps; the root rank prints.

    Each report is the mean over the samples since the one before, not since the start. The
    callback must stand in the list of every rank.

    Args:
        num_steps: optimizer steps of the whole run.
        global_batch: images of all ranks in one step.
        first_step: steps made before this `fit`, as after a resume.
        every: steps from one report to the next.
        log_dir: where the root rank writes the same numbers for TensorBoard.

    Attributes:
        losses: the loss of each report.
        step_times_ms: the duration of each step but the first two, which trace the graph.
    """

    def __init__(
        self,
        num_steps: int,
        global_batch: int,
        *,
        first_step: int = 0,
        every: int = 10,
        log_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        self._num_steps = num_steps
        self._global_batch = global_batch
        self._first_step = self._step = first_step
        self._every = every
        is_root = world.current().is_root
        self._writer = tf.summary.create_noop_writer()
        if log_dir is not None and is_root:
            self._writer = tf.summary.create_file_writer(str(log_dir))
        self._show = sys.stderr.isatty() if is_root else False
        self._last = time.perf_counter()
        self.losses: list[float] = []
        self.step_times_ms: list[float] = []

    @property
    def final_loss(self) -> float:
        """The loss of the last report."""
        return self.losses[-1] if self.losses else math.nan

    @property
    def step_time_ms(self) -> float:
        """The median duration of a step."""
        return statistics.median(self.step_times_ms) if self.step_times_ms else math.nan

    @property
    def images_per_second(self) -> float:
        """Images of all ranks in a second, by the median step."""
        return self._global_batch / self.step_time_ms * 1000

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Starts the clock."""
        self._last = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Counts a step and reports when it is time."""
        now = time.perf_counter()
        if self._step - self._first_step >= 2:
            self.step_times_ms.append((now - self._last) * 1000)
        self._last = now
        self._step += 1
        if self._step % self._every == 0 or self._step == self._num_steps:
            self._report()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Ends the bar's line and the log."""
        if self._show:
            print(file=sys.stderr)
        self._writer.close()

    def _report(self) -> None:
        """Takes the mean over the ranks, prints it, logs it, and begins a new mean."""
        evaluation.pool_metrics(self.model)
        means = {name: float(value) for name, value in self.model.get_metrics_result().items()}
        self.losses.append(means.get("loss", math.nan))
        self.model.reset_metrics()
        with self._writer.as_default(step=self._step):
            for name, value in means.items():
                tf.summary.scalar(name, value)
            tf.summary.scalar("images_per_second", self.images_per_second)
        if world.current().is_root:
            self._print(means)

    def _print(self, means: dict[str, float]) -> None:
        """One line; on a terminal each takes the place of the one before."""
        done = self._step / self._num_steps
        bar = ("#" * round(done * _CELLS)).ljust(_CELLS, ".")
        numbers = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        left = (self._num_steps - self._step) * self.step_time_ms / 1000
        speed = "" if math.isnan(left) else f"  {self.images_per_second:,.0f} images/s"
        speed += "" if math.isnan(left) else f"  {int(left) // 60}:{int(left) % 60:02d} left"
        line = f"[{bar}] step {self._step}/{self._num_steps}  {numbers}{speed}"
        print(f"\r\033[K{line}" if self._show else line, end="" if self._show else "\n",
              file=sys.stderr, flush=True)
