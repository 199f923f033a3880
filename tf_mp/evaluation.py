"""Evaluation by all ranks at once, exact: each rank sees its part, the sums are pooled."""

from typing import Any

import keras
import numpy as np

from tf_mp import world

__all__ = ["evaluate", "pool_metrics"]


def evaluate(model: keras.Model, *data: Any) -> dict[str, float]:
    """Evaluates a model on the parts of all ranks; every rank gets the same numbers.

    Args:
        model: compiled with a loss and metrics.
        *data: this rank's part of the data set, as `model.evaluate` takes it; at least one batch.
    """
    model.evaluate(*data, verbose=0)
    pool_metrics(model)
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def pool_metrics(model: keras.Model) -> None:
    """Gives each metric the sum of its states over all ranks.

    A Keras metric keeps sums: weighted values and weights, or counts of cases. So the result over
    all ranks is that of the summed states, the sum of sums over the sum of counts. A mean of the
    ranks' results would be wrong where their parts differ in size.
    """
    states = [variable for metric in model.metrics for variable in metric.variables]
    ours = [np.asarray(state, np.float64).tolist() for state in states]
    ranks = world.exchange(ours, what="the sums of the metrics")
    for state, values in zip(states, zip(*ranks, strict=True), strict=True):
        state.assign(np.sum(np.asarray(values, np.float64), axis=0).astype(state.dtype))
