"""Keeps other devices busy while one is timed.

Logical CPU devices share cores, caches and the way to memory, so a stage takes longer while the
others work. How much longer depends on what they do; so they do what they will do in the pipeline.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

__all__ = ["at_work"]


@contextlib.contextmanager
def at_work(loads: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Calls each function again and again, in a thread of its own, until the block ends.

    Args:
        loads: What the others do, one function a device. A call that is under way when the block
            ends is waited for.

    Raises:
        Exception: what a load raised, at the end of the block.
    """
    ending = threading.Event()
    failed: list[Exception] = []

    def repeat(load: Callable[[], object]) -> None:
        try:
            while not ending.is_set():
                load()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=repeat, args=(load,), daemon=True) for load in loads]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
