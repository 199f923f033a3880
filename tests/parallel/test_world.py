"""What two ranks tell each other, and that a difference is an error on both."""

import pytest

from tf_mp import devices, world


def test_there_are_two_ranks_on_this_host():
    here = world.current()
    assert (here.size, here.local_size) == (2, 2)
    assert here.rank == here.local_rank


def test_values_of_different_lengths_come_in_rank_order():
    rank = world.current().rank
    mine = {"rank": rank, "text": "ä" * (1 + 5000 * rank), "none": None}
    both = world.exchange(mine)
    assert [one["rank"] for one in both] == [0, 1]
    assert [len(one["text"]) for one in both] == [1, 5001]


def test_the_roots_value_reaches_everyone():
    assert world.broadcast(f"from {world.current().rank}") == "from 0"


def test_equal_values_agree():
    world.agree("nothing special", {"a": [1, 2.5, "x"]})


def test_a_difference_is_an_error_on_every_rank_that_names_the_rank():
    with pytest.raises(ValueError, match="rank 1 has batch=101 where rank 0 has 100"):
        world.agree("settings", {"batch": 100 + world.current().rank, "seed": 0})


def test_ranks_at_different_places_are_an_error_on_every_rank():
    with pytest.raises(RuntimeError, match="rank 0: place 0, rank 1: place 1"):
        world.exchange(None, what=f"place {world.current().rank}")


def test_ranks_go_on_together_after_an_error():
    assert world.exchange(world.current().rank) == [0, 1]


def test_each_rank_has_its_devices():
    assert devices.owned() == tuple(f"/device:CPU:{index}" for index in range(4))
