"""The compiled losses, output by output, and the weight of each micro-batch in each.

Keras's `compile` keeps losses, loss weights and sample weights in nested structures that it
matches with the outputs at each call. `resolve` lets Keras do that matching once and writes down
what each loss would be called with; the micro-batches are then slices of it.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, microbatch

__all__ = ["OutputLoss", "denominators", "has_loss_mask", "mask_of", "resolve", "scale_dtype"]


@dataclasses.dataclass(eq=False)
class OutputLoss:
    """One compiled loss with what it is called with, for the whole local batch.

    Attributes:
        output: Index of the model's output, in Keras's flat order.
        loss: The Keras loss.
        weight: Its entry of `loss_weights`, or None.
        tracker: Keras's metric of this loss (several outputs only), or None.
        y_true: (local_batch, ...) labels; None where the loss needs none.
        sample_weight: (local_batch, ...) or None.
    """

    output: int
    loss: Any
    weight: Any
    tracker: Any
    y_true: Any
    sample_weight: Any

    def value(self, y_pred: Any, y_true: Any, sample_weight: Any) -> tf.Tensor:
        """The loss of one micro-batch by its own reduction, scalar of Keras's float type."""
        value = self.loss(y_true, y_pred, sample_weight)
        return tf.reduce_sum(tf.cast(value, keras.config.floatx()))


def resolve(
    model: keras.Model, outputs: Sequence[Any], structure: Any, y_true: Any, sample_weight: Any
) -> list[OutputLoss]:
    """What each compiled loss of the model would be called with.

    Args:
        model: The compiled model.
        outputs: Its symbolic outputs, flat.
        structure: The structure of its outputs, as Keras returns them.
        y_true: Labels in any structure that Keras accepts, (local_batch, ...) each.
        sample_weight: Likewise, or None.

    Raises:
        ValueError: for a loss over several outputs at once.
    """
    compiled = model._compile_loss
    if compiled is None:
        return []
    if len(outputs) == 1 and not keras.tree.is_nested(y_true):
        symbols = outputs[0]
    else:
        symbols = structure
    if not compiled.built:
        with contextlib.suppress(_Built):
            _call(compiled, y_true, symbols, sample_weight, stop=True)
    calls = _call(compiled, y_true, symbols, sample_weight)
    trackers = list(compiled.metrics) or [None] * len(calls)
    index = {id(symbol): j for j, symbol in enumerate(outputs)}
    found = []
    for (loss, weight, y_t, y_p, s_w), tracker in zip(calls, trackers, strict=True):
        if id(y_p) not in index:
            raise ValueError(
                f"The loss {loss.name!r} is not of one output. Received: a structure of outputs. "
                "Expected: one loss for each output, e.g. `loss={'name': ...}`."
            )
        found.append(OutputLoss(index[id(y_p)], loss, weight, tracker, y_t, s_w))
    return found


class _Built(Exception):
    """Ends a call of the compiled losses once Keras has built them."""


def _call(compiled: Any, y_true: Any, symbols: Any, sample_weight: Any, stop: bool = False) -> Any:
    """Calls Keras's compiled losses with stand-ins that write down their arguments."""
    calls: list[tuple[Any, ...]] = []
    with _stand_ins(compiled, calls, stop):
        compiled.call(y_true, symbols, sample_weight)
    return calls


@contextlib.contextmanager
def _stand_ins(compiled: Any, calls: list[Any], stop: bool) -> Iterator[None]:
    flat, metrics, build = compiled._flat_losses, compiled._metrics, compiled.build

    def built(y_true: Any, y_pred: Any) -> None:
        build(y_true, y_pred)
        raise _Built

    if stop:
        compiled.build = built
    else:
        compiled._flat_losses = [_stand_in(entry, calls) for entry in flat]
        compiled._metrics = [None] * len(flat)
    try:
        yield
    finally:
        if stop:
            del compiled.build
        else:
            compiled._flat_losses, compiled._metrics = flat, metrics


def _stand_in(entry: Any, calls: list[Any]) -> Any:
    def note(y_true: Any, y_pred: Any, sample_weight: Any = None) -> float:
        calls.append((entry.loss, entry.loss_weights, y_true, y_pred, sample_weight))
        return 0.0

    return entry._replace(loss=note, loss_weights=None)


def has_loss_mask(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the loss itself masks entries, as `ignore_class` does.

    Args:
        loss: A Keras loss.
        y_true: (local_batch, ...) labels.
        y_pred: The symbolic output.
    """

    def values(labels: Any, predictions: Any) -> Any:
        return compat.get_mask(loss.call(labels, predictions)) is not None

    found = False
    with tf.Graph().as_default():
        labels = tf.nest.map_structure(lambda t: tf.zeros(_shape(t), loss.dtype), y_true)
        predictions = tf.zeros([_batch(y_true), *_rest(y_pred.shape)], loss.dtype)
        found = values(labels, predictions)
    return found


def mask_of(entry: OutputLoss, y_pred: Any, mask: Any) -> Any:
    """The mask that a loss applies over the local batch: the output's and the loss's own."""
    labels, predictions = (
        tf.nest.map_structure(lambda t: tf.cast(t, entry.loss.dtype), tensor)
        for tensor in (entry.y_true, y_pred)
    )
    own = compat.get_mask(entry.loss.call(labels, predictions))
    if own is None or mask is None:
        return mask if own is None else own
    return tf.logical_and(tf.cast(mask, tf.bool), tf.cast(own, tf.bool))


def _shape(tensor: Any) -> list[int]:
    return [1 if size is None else size for size in tensor.shape]


def _batch(y_true: Any) -> int:
    return _shape(tf.nest.flatten(y_true)[0])[0] if y_true is not None else 1


def _rest(shape: Sequence[int | None]) -> list[int]:
    return [1 if size is None else size for size in shape[1:]]


def scale_dtype() -> tf.DType:
    """What denominators and the factors of gradients are computed in: float32 at least."""
    return tf.float64 if keras.config.floatx() == "float64" else tf.float32


def denominators(
    entry: OutputLoss, sizes: Sequence[int], mask: Any, cut: Callable[[Any], list[Any]]
) -> list[Any]:
    """What the loss divides by in each micro-batch; a plain number where no tensor decides it.

    Args:
        entry: The loss.
        sizes: Samples of each micro-batch.
        mask: Mask of the output over the whole local batch, (local_batch, ...), or None. For a
            loss that masks entries itself, that mask is included.
        cut: Cuts a (local_batch, ...) tensor into the micro-batches.

    Returns:
        For each micro-batch a number or a scalar tensor of `scale_dtype`; None for `sum`.
    """
    reduction = getattr(entry.loss, "reduction", "sum_over_batch_size")
    if reduction in ("sum", None, "none"):
        return [None] * len(sizes)
    weighted = reduction == "mean_with_sample_weight"
    weights = [None] * len(sizes)
    if weighted and entry.sample_weight is not None:
        weights = cut(entry.sample_weight)
    masks = [None] * len(sizes) if mask is None else cut(mask)
    found = []
    for size, weight, valid in zip(sizes, weights, masks, strict=True):
        if weight is None and valid is None:
            found.append(microbatch.denominator(reduction, size))
        elif weight is None:
            count = tf.reduce_sum(tf.cast(valid, scale_dtype()))
            found.append(microbatch.denominator(reduction, size, num_valid=count))
        else:
            made = compat.loss_weights_of_mask(weight, valid, reduction)
            total = tf.cast(tf.reduce_sum(made), scale_dtype())
            found.append(microbatch.denominator(reduction, size, weight_sum=total))
    return found
