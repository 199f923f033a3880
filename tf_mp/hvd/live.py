"""A number that Python sees as constant and a traced step reads anew each time."""

from typing import Any

import tensorflow as tf

__all__ = ["LiveFloat"]


class LiveFloat(float):
    """A float whose tensor is read from a variable, so that it can change between steps.

    Comparisons, `get_config` and saved files see the number that it was made with.

    Args:
        value: the number.
    """

    dtype = "float32"  # as what Keras's arithmetic takes it

    def __init__(self, value: float) -> None:
        super().__init__()
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = tf.Variable(float(value), trainable=False, dtype=tf.float32)
        self._is_scaled = False

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """The present value as a tensor; TensorFlow asks for it wherever it needs one."""
        del name
        value = self._variable.read_value()
        return value if dtype is None else tf.cast(value, dtype)

    def scale(self, factor: float) -> None:
        """Multiplies the value until `restore`."""
        if factor != 1 or self._is_scaled:
            self._variable.assign(float(self) * factor)
            self._is_scaled = True

    def restore(self) -> None:
        """Gives the value the number that it was made with."""
        if self._is_scaled:
            self._variable.assign(float(self))
            self._is_scaled = False
