"""Samples are dealt to ranks without leaving, doubling or hiding one: the arithmetic alone."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tf_mp import microbatch
from tf_mp.dealing import Deal, Share

counts = st.integers(1, 500)
batch_sizes = st.integers(1, 40)
world_sizes = st.integers(1, 9)


@given(counts, batch_sizes, world_sizes)
def test_the_shares_of_all_ranks_are_the_whole_split_in_order(count, batch_size, size):
    shares = [Deal(count, batch_size, rank, size).share() for rank in range(size)]
    dealt = [i for start, length in shares for i in range(start, start + length)]
    assert dealt == list(range(count))


@given(counts, batch_sizes, world_sizes)
def test_evaluation_has_as_many_steps_on_every_rank_and_none_is_empty(count, batch_size, size):
    deals = [Deal(count, batch_size, rank, size) for rank in range(size)]
    try:
        all_sizes = [deal.sizes() for deal in deals]
    except ValueError:
        assume(False)
    assert len({sum(number for number, _ in sizes) for sizes in all_sizes}) == 1
    assert all(0 < n <= batch_size for sizes in all_sizes for _, n in sizes)
    for deal, sizes in zip(deals, all_sizes):
        assert sum(number * n for number, n in sizes) == deal.share()[1]


def test_a_rank_with_one_sample_less_splits_its_last_batch_instead_of_missing_a_step():
    assert Deal(count=21, batch_size=10, rank=0, size=2).sizes() == [(1, 10), (1, 1)]
    assert Deal(count=21, batch_size=10, rank=1, size=2).sizes() == [(1, 9), (1, 1)]


def test_fewer_samples_than_ranks_is_an_error_with_the_remedy():
    with pytest.raises(ValueError, match="start fewer ranks"):
        [Deal(3, 10, rank, 4).sizes() for rank in range(4)]


def test_what_is_left_over_is_said_in_numbers():
    said = Deal(count=1050, batch_size=50, rank=0, size=2).left_over("digits train")
    assert "1050 samples fill 10 global batches of 100; 50 are left over" in said
    assert Deal(count=1000, batch_size=50, rank=0, size=2).left_over("digits train") == ""


def test_a_split_smaller_than_a_global_batch_is_an_error_with_the_numbers():
    with pytest.raises(ValueError, match=r"split of 150 samples and a global batch of 200 \(2"):
        Deal(150, 100, 0, 2).steps_per_epoch()


@pytest.mark.parametrize("wrong", [(10, 0, 0, 1), (10, 5, 2, 2), (10, 5, -1, 2)])
def test_a_rank_or_batch_size_out_of_range_is_an_error(wrong):
    with pytest.raises(ValueError, match="Expected batch_size of 1 or more"):
        Deal(*wrong)


@given(st.integers(1, 200), st.integers(1, 40), world_sizes)
def test_shares_are_the_same_micro_batches_for_every_number_of_ranks(batch, micro_batches, size):
    sizes = microbatch.sizes(batch, micro_batches)
    assume(size <= len(sizes))
    shares = [Share.of(batch, micro_batches, rank, size) for rank in range(size)]
    assert [sample for s in shares for sample in range(s.start, s.stop)] == list(range(batch))
    assert max(s.micro_batches for s in shares) - min(s.micro_batches for s in shares) <= 1
    for share in shares:  # a rank that cuts its own samples finds just these
        first, count = share.first_micro_batch, share.micro_batches
        assert microbatch.sizes(share.num_samples, count) == sizes[first : first + count]


def test_eight_micro_batches_over_three_ranks_are_three_three_and_two():
    shares = [Share.of(24, 8, rank, 3) for rank in range(3)]
    assert [share.micro_batches for share in shares] == [3, 3, 2]
    assert [share.first_micro_batch for share in shares] == [0, 3, 6]
    assert [share.num_samples for share in shares] == [9, 9, 6]


def test_more_ranks_than_micro_batches_is_an_error_with_the_remedy():
    with pytest.raises(ValueError, match="Received: 2 micro-batches for 3 ranks"):
        Share.of(24, 2, 0, 3)
