"""How a run ends before its time: on all ranks at the same step, and never with exit code 0.

A signal reaches one rank, or some, at any moment. So each rank only notes it, and after every
step the ranks tell each other what they noted; all save and leave together. That exchange takes
one small allgather a step, about two Horovod cycles (2 to 3 ms with the default of 1 ms).

`horovodrun` under MPI turns itself into a shell around `mpirun`, which dies of a signal without
passing it on. Ranks would go on without anyone to stop them; so its death counts as a signal.
"""

import math
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import keras

from tf_mp import world
from tf_mp.datasets import DataError

__all__ = ["AgreedStop", "end_all_on_error", "guarded"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOPPED, INTERRUPTED = 143, 130
_CUT_OFF = "Horovod has been shut down"

_hosts: list[str] = []
"""The host of each rank, told at the start of the training."""


class AgreedStop(keras.callbacks.Callback):
    """Ends the run on all ranks after a step, when one of them got a signal or lost its loss.

    SIGTERM and SIGUSR1 end with exit code 143, Ctrl-C with 130, each after `save`. A loss that is
    not finite on any rank ends with an error on all, without saving. When one rank is told to stop
    (`model.stop_training`, as by `EarlyStopping`) all stop with it. The callback must stand in the
    list of every rank, after those that may stop the training.

    Args:
        save: called on every rank before leaving because of a signal.
    """

    def __init__(self, save: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._save = save
        self._code = 0
        self._former: dict[int, Any] = {}
        self._shell: int | None = None

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Starts to listen.

        Raises:
            ValueError: several ranks, and nobody knows when the data of each will end.
        """
        size = world.current().size
        if size > 1 and self.params.get("steps") is None:
            raise ValueError(
                f"Received: data of unknown length on {size} ranks. Expected: a known number of "
                "steps, for the rank whose data end first would leave the others waiting. Pass "
                "steps_per_epoch, with data that repeat()."
            )
        for number in _SIGNALS:
            self._former[number] = signal.signal(number, self._note)
        self._shell = _shell_of_horovodrun()
        _hosts[:] = world.exchange(platform.node(), what="host names")

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Gives the signals back to who had them."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Tells the other ranks, hears them, and leaves when one has a reason.

        Raises:
            SystemExit: after a signal to any rank, on every rank.
            FloatingPointError: after a loss that is not finite on any rank, on every rank.
        """
        if self._shell not in (None, _grandparent()):
            self._code = self._code or STOPPED
        loss = float((logs or {}).get("loss", 0.0))
        notes = world.exchange(
            [self._code, math.isfinite(loss), bool(self.model.stop_training)],
            what="reasons to stop",
        )
        lost = [rank for rank, (_, finite, _) in enumerate(notes) if not finite]
        if lost:
            raise FloatingPointError(
                f"Received: a loss that is not finite on ranks {lost}, in step {batch + 1} of "
                "this fit. Expected: a number. Nothing was saved; lower the learning rate, or "
                "look at the data of that step."
            )
        noted = [code for code, _, _ in notes]
        if any(noted):
            self._leave(max(noted), [rank for rank, code in enumerate(noted) if code])
        self.model.stop_training = any(early for _, _, early in notes)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stops on all ranks after an epoch when one of them is told to."""
        early = world.exchange(bool(self.model.stop_training), what="whether to stop early")
        self.model.stop_training = any(early)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Remembers a signal; the second Ctrl-C ends at once."""
        if number == signal.SIGINT and self._code == INTERRUPTED:
            raise KeyboardInterrupt
        self._code = INTERRUPTED if number == signal.SIGINT else STOPPED

    def _leave(self, code: int, ranks: list[int]) -> None:
        """Saves on all ranks and exits when the last one has finished."""
        world.say(f"signal on ranks {ranks}: saving and leaving with exit code {code}.")
        if self._save is not None:
            self._save()
        # A launcher kills the others as soon as one has left.
        world.exchange(None, what="leaving")
        sys.stdout.flush()
        raise SystemExit(code)


def _grandparent() -> int:
    """The process id of what started this process's parent; 0 where that cannot be read."""
    try:
        text = Path(f"/proc/{os.getppid()}/stat").read_text()
        return int(text.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _shell_of_horovodrun() -> int | None:
    """The process id of the shell that `horovodrun` has become on this host, if there is one."""
    pid = _grandparent()
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return None
    is_shell = words[:2] == ["/bin/sh", "-c"] and words[2].startswith("mpirun")
    return pid if is_shell else None


def guarded(main: Callable[[], int | None]) -> int:
    """Runs a program; an error becomes a message and an exit code that end all ranks.

    Args:
        main: the program; what it returns is the exit code.
    """
    try:
        return main() or 0
    except (Exception, KeyboardInterrupt) as error:
        return _end(error)


def end_all_on_error() -> None:
    """Makes an error that nobody catches end this rank at once, so that no other waits for it."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _end(error)

    if world.current().size > 1:
        sys.excepthook = hook


def _is_ours(error: BaseException) -> bool:
    """Whether a message is in our own words: what was received, and what was expected."""
    if isinstance(error, DataError) or str(error).startswith("Received"):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    here = frames and Path(__file__).parent in Path(frames[-1].f_code.co_filename).parents
    return bool(here) and ("Received" in str(error) or "Expected" in str(error))


def _lost(here: world.World) -> str:
    """Words for the end of the connection to the others, of which this rank is not the cause."""
    others = [
        f"rank {rank} on {host}" for rank, host in enumerate(_hosts) if rank != here.rank
    ] or [f"the other {here.size - 1} ranks"]
    return (
        f"tf_mp: Received: no answer from another rank ({', '.join(others)}). Expected: all ranks "
        "alive and reachable. The cause is in that rank's output, or its host is cut off.\n"
    )


def _end(error: BaseException) -> int:
    """Prints what happened and, where there are other ranks, ends this one at once.

    Python's usual end would first shut Horovod down in good order, and the others would report
    that instead of the cause. The launcher, or the broken connection, ends them.
    """
    here = world.current()
    told = _is_ours(error)  # it says what to do: where it was raised says nothing
    text = f"tf_mp: {error}\n" if told else "".join(traceback.format_exception(error))
    if here.size > 1 and _CUT_OFF in str(error):
        text = _lost(here)
    where = f" on rank {here.rank} of {here.size}" if here.size > 1 else ""
    print(f"{text}tf_mp: the run ended with this error{where}.", file=sys.stderr, flush=True)
    sys.stdout.flush()
    code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    if here.size > 1:
        os._exit(code)
    return code
