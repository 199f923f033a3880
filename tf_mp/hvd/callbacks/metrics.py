"""The logs of an epoch become those of all ranks together."""

from typing import Any

import keras

from tf_mp import world
from tf_mp.hvd.basics import size

__all__ = ["MetricAverageCallback"]


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks, in the logs themselves.

    Put it before the callbacks that read the logs. A metric that is a mean counts each rank by the
    samples (or the sum of weights) behind it there; others count the samples of the loss. A rank
    without samples does not count.

    Args:
        device: accepted for Horovod's sake; metrics are averaged on the host.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._train_counts: dict[str, set[float]] = {}
        self._training = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forgets the counts of the last epoch."""
        self._training = True
        self._train_counts = {}

    def on_test_begin(self, logs: Any = None) -> None:
        """Keeps the training counts: validation uses the same metric objects."""
        if self._training:
            self._train_counts = _counts(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces every number in `logs` by its mean over ranks.

        Raises:
            ValueError: on every rank, where the ranks' metrics have different names.
        """
        self._training = False
        if logs is None or size() == 1:
            return
        numbers = {k: float(v) for k, v in logs.items() if isinstance(v, (int, float))}
        mine = {name: [value, self._count(name)] for name, value in numbers.items()}
        ranks = world.exchange(_as_text(mine), what="the metrics of an epoch")
        _check_same_names(ranks)
        for name in mine:
            logs[name] = _mean([(float(rank[name][0]), float(rank[name][1])) for rank in ranks])

    def _count(self, name: str) -> float:
        """What is behind an entry of the logs on this rank."""
        now = _counts(self.model)
        if name.startswith("val_"):
            return _lookup(now, name.removeprefix("val_"))
        return _lookup(self._train_counts or now, name)


def _counts(model: keras.Model) -> dict[str, set[float]]:
    """The counts behind a model's metrics that are means, by the metric's name."""
    counts: dict[str, set[float]] = {}
    for metric in model.metrics:
        for one in getattr(metric, "metrics", None) or [metric]:
            count = getattr(one, "count", None)
            if count is not None:
                counts.setdefault(one.name, set()).add(float(count))
    return counts


def _lookup(counts: dict[str, set[float]], name: str) -> float:
    """The count of one entry; with several outputs its name ends in the metric's name."""
    endings = [found for found in counts if name.endswith(f"_{found}")]
    for found in [name, *endings, "loss"]:
        if len(counts.get(found, ())) == 1:
            return next(iter(counts[found]))
    return 1.0


def _as_text(numbers: dict[str, list[float]]) -> dict[str, list[str]]:
    # JSON has no nan and no infinity; text also keeps every bit.
    return {name: [repr(number) for number in pair] for name, pair in numbers.items()}


def _check_same_names(ranks: list[dict[str, Any]]) -> None:
    names = [sorted(rank) for rank in ranks]
    if any(one != names[0] for one in names):
        common = set(names[0]).intersection(*names)
        extra = "; ".join(
            f"rank {rank}: {sorted(set(one) - common)}" for rank, one in enumerate(names)
        )
        raise ValueError(
            f"Received: metrics that only some ranks have ({extra}). Expected: the same on every "
            "rank; give validation_data and metrics to all ranks, not behind a test of the rank."
        )


def _mean(pairs: list[tuple[float, float]]) -> float:
    """The mean of values by their counts: the sum of sums over the sum of counts."""
    total = sum(count for _, count in pairs)
    if total <= 0:
        return sum(value for value, _ in pairs) / len(pairs)
    return sum(value * count for value, count in pairs if count) / total
