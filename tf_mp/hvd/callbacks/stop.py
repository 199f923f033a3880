"""Training stops on all ranks at the same step, or on none."""

from typing import Any

import horovod.tensorflow as _horovod
import keras
import numpy as np
import tensorflow as tf

from tf_mp import world
from tf_mp.hvd.basics import Max, size

__all__ = ["EarlyStopping", "TerminateOnNaN"]


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's `EarlyStopping`, decided on the mean of the monitored value over all ranks.

    All ranks stop after the same epoch, and restore the weights of the same epoch. Arguments and
    behaviour are Keras's; ranks that differ in having the value at all are named, not hung on.
    """

    def get_monitor_value(self, logs: Any) -> Any:
        """The mean over ranks of the monitored value, or None where no rank has it.

        Raises:
            ValueError: on every rank, where only some ranks have the value.
        """
        value = super().get_monitor_value(logs)
        if size() == 1:
            return value
        mine = None if value is None else repr(float(value))
        ranks = world.exchange(mine, what=f"{self.monitor} for EarlyStopping")
        without = [rank for rank, one in enumerate(ranks) if one is None]
        if without and len(without) < len(ranks):
            raise ValueError(
                f"Received: {self.monitor} on some ranks only; ranks {without} have none. "
                "Expected: the same metrics and validation data on every rank."
            )
        return None if without else sum(map(float, ranks)) / len(ranks)


class TerminateOnNaN(keras.callbacks.TerminateOnNaN):
    """Keras's `TerminateOnNaN`: a loss that is no number on one rank stops all of them.

    The ranks tell each other after every batch. All stop at the same one; with `raise_error` all
    raise.
    """

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops, on every rank, if any rank's loss is no number.

        Raises:
            RuntimeError: with `raise_error`, on every rank.
        """
        logs = dict(logs or {})
        loss = logs.get("loss")
        if size() > 1:
            bad = loss is not None and not np.isfinite(loss)
            flag = _horovod.allreduce(tf.constant(int(bad)), op=Max, name="terminate_on_nan")
            if int(flag) and not bad:
                logs["loss"] = float("nan")
        super().on_batch_end(batch, logs)
