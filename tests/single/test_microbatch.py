"""The arithmetic of micro-batches against what one whole batch gives."""

import random

import pytest

from tf_mp.microbatch import deal, denominator, merge, offsets, shares, sizes, weight


@pytest.mark.parametrize(
    ("batch", "micro_batches", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (10, 4, (3, 3, 2, 2)),
        (100, 3, (34, 33, 33)),
        (7, 1, (7,)),
        (4, 4, (1, 1, 1, 1)),
        (3, 4, (1, 1, 1)),
        (1, 8, (1,)),
    ],
)
def test_sizes_are_balanced_and_never_empty(batch, micro_batches, expected):
    assert sizes(batch, micro_batches) == expected


def test_every_sample_is_in_exactly_one_micro_batch():
    for batch in range(1, 40):
        for micro_batches in range(1, 12):
            parts = sizes(batch, micro_batches)
            starts = offsets(parts)
            covered = [
                sample
                for start, size in zip(starts, parts, strict=True)
                for sample in range(start, start + size)
            ]
            assert covered == list(range(batch))
            assert min(parts) >= 1 and max(parts) - min(parts) <= 1
            assert len(parts) == min(batch, micro_batches)


@pytest.mark.parametrize(
    ("batch", "micro_batches", "message"),
    [(0, 4, "batch=0"), (4, 0, "micro_batches=0"), (4, 2.5, "micro_batches=2.5")],
)
def test_wrong_counts_are_named(batch, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        sizes(batch, micro_batches)


def test_micro_batches_are_dealt_to_ranks_in_order():
    assert [list(deal(5, 2, rank)) for rank in range(2)] == [[0, 1, 2], [3, 4]]
    assert [list(deal(8, 3, rank)) for rank in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_every_micro_batch_is_dealt_once_at_every_world_size():
    for world_size in range(1, 9):
        dealt = [i for rank in range(world_size) for i in deal(8, world_size, rank)]
        assert dealt == list(range(8))


def test_a_rank_without_a_micro_batch_is_refused():
    with pytest.raises(ValueError, match="2 micro-batches for 3 ranks.*fewer ranks"):
        deal(2, 3, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank}. Expected: 0 to 1"):
        deal(4, 2, rank)


def test_denominators_are_those_of_keras_losses():
    assert denominator("sum_over_batch_size", 12) == 12
    assert denominator("mean", 12, num_valid=7) == 7
    assert denominator("sum_over_batch_size", 12, weight_sum=3.5) == 12
    assert denominator("mean_with_sample_weight", 12, weight_sum=3.5) == 3.5
    assert denominator("mean_with_sample_weight", 12) == 12
    assert denominator("sum", 12, num_valid=7, weight_sum=3.5) is None


@pytest.mark.parametrize("reduction", ["none", None, "average"])
def test_a_reduction_that_gives_no_scalar_is_refused(reduction):
    with pytest.raises(ValueError, match="which give a scalar"):
        denominator(reduction, 12)


def whole(values, valid, weights, reduction):
    """The loss of one batch, by the formulas of `keras.losses`."""
    total = sum(v * m * w for v, m, w in zip(values, valid, weights, strict=True))
    if reduction == "sum":
        return total
    below = sum(valid)
    if reduction == "mean_with_sample_weight":
        below = sum(m * w for m, w in zip(valid, weights, strict=True))
    return total / below if below else 0.0  # Keras: divide_no_nan


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize(("micro_batches", "world_size"), [(1, 1), (4, 1), (1, 2), (3, 2), (7, 2)])
def test_weighted_micro_batches_equal_the_whole_batch(reduction, micro_batches, world_size):
    draw = random.Random(micro_batches)
    values = [draw.random() for _ in range(23)]
    valid = [draw.choice([0, 1]) for _ in range(23)]
    weights = [draw.random() for _ in range(23)]
    parts = sizes(23, micro_batches * world_size)
    runs = [slice(a, a + s) for a, s in zip(offsets(parts), parts, strict=True)]
    below = [
        denominator(
            reduction,
            len(values[run]),
            num_valid=sum(valid[run]),
            weight_sum=sum(m * w for m, w in zip(valid[run], weights[run], strict=True)),
        )
        for run in runs
    ]
    total = None if reduction == "sum" else sum(below)
    losses = [whole(values[run], valid[run], weights[run], reduction) for run in runs]
    expected = whole(values, valid, weights, reduction)

    def reduced(num_ranks):
        """What each rank contributes, summed and divided by `num_ranks` (1: op=Sum)."""
        ranks = [
            sum(
                weight(below[i], total, num_ranks) * losses[i]
                for i in deal(len(runs), world_size, r)
            )
            for r in range(world_size)
        ]
        return sum(ranks) / num_ranks

    assert reduced(1) == pytest.approx(expected, rel=1e-12)
    assert reduced(world_size) == pytest.approx(expected, rel=1e-12)
    plain_mean = sum(losses) / len(losses)
    if micro_batches * world_size in (4, 6) and reduction != "sum":
        assert plain_mean != pytest.approx(expected, rel=1e-3)  # why the weights are there


@pytest.mark.parametrize("parts", [(4,), (2, 2), (3, 2, 2), (1, 1, 1, 1)])
def test_merged_moving_mean_equals_that_of_the_whole_batch(parts):
    draw = random.Random(0)
    samples = [draw.random() for _ in range(sum(parts))]
    old, momentum = 0.25, 0.9

    def moved(batch):
        return momentum * old + (1 - momentum) * sum(batch) / len(batch)

    states = [moved(samples[a : a + s]) for a, s in zip(offsets(parts), parts, strict=True)]
    assert merge(old, states, shares(parts)) == pytest.approx(moved(samples), rel=1e-12)
    assert sum(shares(parts)) == pytest.approx(1.0)


def test_merge_needs_a_share_for_each_state():
    with pytest.raises(ValueError):
        merge(0.0, [1.0, 2.0], [1.0])
