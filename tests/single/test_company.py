"""Other devices work while one is timed."""

import threading
import time

import pytest

from tf_mp import company


def test_each_load_runs_again_and_again_and_ends_with_the_block():
    turns, threads = [0, 0], set()

    def load(place):
        turns[place] += 1
        threads.add(threading.get_ident())
        time.sleep(0.001)

    with company.at_work([lambda: load(0), lambda: load(1)]):
        deadline = time.monotonic() + 30
        while min(turns) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    ended = list(turns)
    assert min(ended) >= 3
    assert len(threads) == 2 and threading.get_ident() not in threads
    time.sleep(0.02)
    assert turns == ended


def test_a_call_under_way_is_waited_for():
    begun, ended = threading.Event(), []

    def load():
        begun.set()
        time.sleep(0.05)
        ended.append(True)

    with company.at_work([load]):
        begun.wait(30)
    assert ended


def test_what_a_load_raises_is_not_lost():
    def load():
        raise OSError("no more memory")

    with pytest.raises(OSError, match="no more memory"), company.at_work([load]):
        time.sleep(0.01)


def test_an_error_of_the_block_goes_first_and_all_end():
    seen = set()

    def load():
        seen.add(threading.current_thread())
        time.sleep(0.001)

    with pytest.raises(KeyError), company.at_work([load]):
        while not seen:
            time.sleep(0.001)
        raise KeyError("the block")
    assert not any(thread.is_alive() for thread in seen)
