"""Horovod's Keras callbacks on Keras 3, and two that stop all ranks at the same step."""

from tf_mp.hvd.callbacks.broadcast import BroadcastGlobalVariablesCallback
from tf_mp.hvd.callbacks.checkpoint import BestModelCheckpoint
from tf_mp.hvd.callbacks.metrics import MetricAverageCallback
from tf_mp.hvd.callbacks.schedule import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from tf_mp.hvd.callbacks.stop import EarlyStopping, TerminateOnNaN

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "EarlyStopping",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "TerminateOnNaN",
]
