"""`backward_passes_per_step`: gradients are added up on each rank, then reduced and applied once.

The sums live beside the optimizer, not among its variables: a saved model stays a plain one. What
a rank has added up when training ends or a model is saved is dropped, as in Horovod.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_mp.hvd import variables as _variables

__all__ = ["Accumulator"]


class Accumulator:
    """Sums of gradients, one for each variable, and how many passes they hold.

    Args:
        passes: passes after which the sums are used.
        average: whether the sums are divided by `passes` then.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self.passes = passes
        self.average = average
        self._sums: dict[int, tf.Variable] = {}
        self._count: tf.Variable | None = None

    def run(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        last: Callable[[list[Any]], None],
        other: Callable[[], None],
    ) -> None:
        """Adds one pass; after the last one calls `last` with the sums, else `other`."""
        sums = [
            None if gradient is None else self._sum_for(variable, gradient)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        count = self._counter()
        added = [_add(total, g) for total, g in zip(sums, gradients, strict=True) if g is not None]
        with tf.control_dependencies(added):
            is_last = tf.equal(count.assign_add(1), self.passes)

        def finish() -> None:
            values = [None if total is None else total.read_value() for total in sums]
            if self.average:
                values = [None if value is None else value / self.passes for value in values]
            last(values)
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            count.assign(0)

        tf.cond(is_last, finish, other)

    def _counter(self) -> tf.Variable:
        if self._count is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._count = tf.Variable(0, trainable=False, name="backward_passes")
        return self._count

    def _sum_for(self, variable: Any, gradient: Any) -> tf.Variable:
        key = _variables.key(variable)
        if key not in self._sums:
            tensor = _variables.tensor_of(variable)
            with tf.init_scope(), tf.device(tensor.device):
                self._sums[key] = tf.Variable(
                    tf.zeros(tensor.shape, gradient.dtype), trainable=False
                )
        return self._sums[key]


def _add(total: tf.Variable, gradient: Any) -> Any:
    """Adds a dense gradient, or slices into the rows that they belong to."""
    if isinstance(gradient, tf.IndexedSlices):
        return total.scatter_add(gradient)
    return total.assign_add(gradient)
