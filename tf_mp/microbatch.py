"""Micro-batches: their sizes, whose they are, and the weight of each in a gradient or a state.

The arithmetic of the first promise (transparency), in plain numbers. The gradient of a step is

    gradient = sum over the micro-batches i of all ranks of  weight_i x gradient_i
    weight_i = denominator_i / (sum of all denominators)

where denominator_i is what the loss itself divides by in micro-batch i (`denominator`). Because
gradient_i = (sum of the gradients of the samples in i) / denominator_i, every sample then counts
as in one whole batch. A plain mean of the gradient_i would be wrong as soon as micro-batches
differ in size, in valid entries under a mask, or in the sum of their sample weights.

State that a forward changes, such as a moving mean, starts equal in every micro-batch of a step
and is merged once (`merge`): new = old + sum over i of share_i x (state_i - old), share_i being
the share of the samples. Chaining the micro-batches instead would apply the momentum m times.

`weight` and `merge` use only +, -, * and /: they accept tensors as well as numbers.
"""

from collections.abc import Sequence
from itertools import accumulate
from numbers import Integral
from typing import Any

__all__ = ["deal", "denominator", "merge", "offsets", "shares", "sizes", "weight"]


def sizes(batch: int, micro_batches: int) -> tuple[int, ...]:
    """Splits a batch into micro-batches as equal as can be, the larger ones first.

    Args:
        batch: Number of samples, at least 1.
        micro_batches: Number of micro-batches wanted, at least 1.

    Returns:
        The samples of each micro-batch. None is empty: with fewer samples than `micro_batches`
        there are fewer of them (the last batch of an epoch), because batch normalisation of an
        empty batch is NaN.

    Raises:
        ValueError: for a count below 1.

    >>> sizes(10, 4)
    (3, 3, 2, 2)
    >>> sizes(3, 4)
    (1, 1, 1)
    """
    _check_count("micro_batches", micro_batches)
    _check_count("batch", batch)
    return _balanced(batch, min(batch, micro_batches))


def offsets(micro_batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """The index of the first sample of each micro-batch.

    >>> offsets((3, 3, 2, 2))
    (0, 3, 6, 8)
    """
    return tuple(accumulate(micro_batch_sizes, initial=0))[:-1]


def deal(total_micro_batches: int, world_size: int, rank: int) -> range:
    """The global indices of the micro-batches of one rank.

    Ranks may get unequal shares, the larger ones first: an elastic job keeps the same global
    micro-batches, and so the same result, when its world size changes.

    Args:
        total_micro_batches: Number of micro-batches of all ranks, at least `world_size`.
        world_size: Number of ranks.
        rank: The rank that asks.

    Raises:
        ValueError: if a rank would get none: it would have no gradient to contribute.

    >>> [list(deal(5, 2, rank)) for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    _check_count("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"Received: rank={rank!r}. Expected: 0 to {world_size - 1}.")
    if total_micro_batches < world_size:
        raise ValueError(
            f"Received: {total_micro_batches} micro-batches for {world_size} ranks. Expected: at "
            "least one a rank. Use more micro-batches, a larger batch, or fewer ranks."
        )
    counts = _balanced(total_micro_batches, world_size)
    first = sum(counts[:rank])
    return range(first, first + counts[rank])


def denominator(
    reduction: str,
    num_values: Any,
    *,
    num_valid: Any = None,
    weight_sum: Any = None,
) -> Any:
    """What a Keras loss of this reduction divides the sum of its values by.

    Args:
        reduction: `"sum_over_batch_size"`, `"mean"`, `"mean_with_sample_weight"` or `"sum"`.
        num_values: Number of values of the loss (samples, or samples x positions).
        num_valid: Number of valid entries under a mask, if there is one.
        weight_sum: Sum of the sample weights (times the mask), if there are any.

    Returns:
        The denominator, or None for `"sum"`, which divides by nothing: `weight` is then 1.

    Raises:
        ValueError: for a reduction that gives no scalar.
    """
    if reduction == "sum":
        return None
    if reduction in ("sum_over_batch_size", "mean"):
        return num_values if num_valid is None else num_valid
    if reduction == "mean_with_sample_weight":
        if weight_sum is not None:
            return weight_sum
        return num_values if num_valid is None else num_valid
    raise ValueError(
        f"Received: a loss with reduction={reduction!r}. Expected: 'sum_over_batch_size', 'mean', "
        "'mean_with_sample_weight' or 'sum', which give a scalar."
    )


def weight(denominator_i: Any, total: Any, num_ranks: int = 1) -> Any:
    """The weight of one micro-batch's loss and gradient, by the first promise of the design.

    Args:
        denominator_i: The loss's own denominator in this micro-batch; None for `"sum"`.
        total: Sum of the denominators of all micro-batches *of all ranks*. Where it is 0 (all
            masked) Keras defines the loss as 0: use a division that gives 0 there.
        num_ranks: By how many ranks the reduction divides afterwards: 1 for `op=Sum`, the world
            size for `op=Average`. It is multiplied in, so that either gives the same gradient.

    >>> weight(3, 12), weight(3, 12, num_ranks=2), weight(None, 12)
    (0.25, 0.5, 1.0)
    """
    if denominator_i is None:
        return float(num_ranks)
    return denominator_i * num_ranks / total


def shares(micro_batch_sizes: Sequence[int]) -> tuple[float, ...]:
    """The share of the samples of each micro-batch, for `merge`.

    >>> shares((2, 1, 1))
    (0.5, 0.25, 0.25)
    """
    total = sum(micro_batch_sizes)
    return tuple(size / total for size in micro_batch_sizes)


def merge(old: Any, states: Sequence[Any], micro_batch_shares: Sequence[float]) -> Any:
    """Merges the floating state that each micro-batch left, starting from the same `old`.

    >>> merge(1.0, [3.0, 5.0], (0.5, 0.5))
    4.0
    """
    moves = zip(micro_batch_shares, states, strict=True)
    return old + sum(share * (state - old) for share, state in moves)


def _balanced(total: int, parts: int) -> tuple[int, ...]:
    small, larger = divmod(total, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def _check_count(what: str, count: int) -> None:
    if not isinstance(count, Integral) or count < 1:
        raise ValueError(f"Received: {what}={count!r}. Expected: an integer of at least 1.")
