"""A claim on work in a shared folder: one process does it, the others wait; no file locks.

Shared file systems may ignore locks, but all of them move a folder in one piece. So a claim is a
folder:

    .preparing.<key>/owner.json         who holds it: token, host, process id
    .preparing.<key>/<token>/           where the owner works; nobody else looks into it
    .preparing.<key>/<token>/beat       a number that the owner raises while it lives

*Take*: the folder is made complete under a private name and moved to the claim's name. Moving onto
a folder that is not empty fails, so one process wins. *Alive*: the beat changes. Who waits
measures with its own clock, so clocks of hosts need not agree; a process id that is gone from the
same host is dead at once. *Bury*: a dead owner's claim is moved aside and deleted with all that it
had begun. *Fail*: the claim is moved aside with the cause in it, which waiting processes read; a
second later that is deleted too.

Two owners at once would waste work and harm nothing: each works under its own token, and what is
ready is moved into place in one piece.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import uuid
from pathlib import Path
from typing import Any

__all__ = ["Claim", "Watch", "take"]

DEAD_SECONDS = 20.0
"""An owner on another host whose beat stands still as long as this is taken for dead."""
NOTE_SECONDS = 1.0
"""How long the cause of a failure stays for those who wait."""


class Claim:
    """A claim that this process holds.

    Attributes:
        work: the folder for unfinished work, empty at the start.
    """

    def __init__(self, folder: Path, key: str, token: str) -> None:
        self._folder, self._key, self._token = folder, key, token
        self._beats = 0
        self.work = _public(folder, key) / token / "work"

    def beat(self) -> None:
        """Shows that the owner lives; call it about once a second."""
        self._beats += 1
        try:
            (self.work.parent / "beat").write_text(str(self._beats))
        except OSError:
            pass  # The folder is gone or full: `held` and the work itself will tell.

    def held(self) -> bool:
        """Whether the claim is still ours: an owner that slept too long may have been buried."""
        return _owner(_public(self._folder, self._key)).get("token") == self._token

    def release(self) -> None:
        """Gives the claim up and deletes all that lies in it."""
        if self.held():
            _delete(_public(self._folder, self._key), self._key)

    def fail(self, cause: str) -> None:
        """Gives the claim up and tells the waiting processes why."""
        note = _note(self._folder, self._key, self._token)
        if not self.held():
            return
        shutil.rmtree(self.work, ignore_errors=True)
        try:
            (self.work.parent / "cause").write_text(cause)
            os.rename(_public(self._folder, self._key), note)
            time.sleep(NOTE_SECONDS)
            _delete(note, self._key)
        except OSError:
            self.release()


class Watch:
    """A look, again and again, at a claim that another process holds."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._seen: tuple[Any, ...] = ()
        self._since = time.monotonic()

    def cause(self) -> str | None:
        """Why the owner that we waited for gave up; None where it did not."""
        if not self._seen:
            return None
        note = _note(self._folder, self._key, self._seen[0])
        try:
            return (note / self._seen[0] / "cause").read_text()
        except OSError:
            return None

    def free(self) -> bool:
        """Whether nobody holds the claim; buries the claim of a dead owner first."""
        path = _public(self._folder, self._key)
        if not path.exists():
            return True
        owner = _owner(path)
        token = owner.get("token", "")  # None: a stranger's folder, dead if nothing moves in it.
        state = (token, _read(path / token / "beat"))
        if state != self._seen:
            self._seen, self._since = state, time.monotonic()
        if _gone(owner) or time.monotonic() - self._since > DEAD_SECONDS:
            _bury(path, self._key, token)
            return not path.exists()
        return False


def take(folder: Path, key: str) -> Claim | None:
    """Takes the claim; None where another process was quicker.

    Raises:
        OSError: the folder cannot be written to.
    """
    token = uuid.uuid4().hex
    private = folder / f".claim.{key}.{token}"
    owner = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        (private / token / "work").mkdir(parents=True)
        (private / token / "beat").write_text("0")
        (private / "owner.json").write_text(json.dumps(owner))
        os.rename(private, _public(folder, key))
    except OSError:
        shutil.rmtree(private, ignore_errors=True)
        if _public(folder, key).exists():
            return None
        raise
    for litter in (*folder.glob(f".claim.{key}.*"), *folder.glob(f".old.{key}.*")):
        shutil.rmtree(litter, ignore_errors=True)  # Of processes that were killed right there.
    return Claim(folder, key, token)


def _public(folder: Path, key: str) -> Path:
    return folder / f".preparing.{key}"


def _note(folder: Path, key: str, token: str) -> Path:
    return folder / f".failed.{key}.{token}"


def _owner(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "owner.json").read_text())
    except (OSError, ValueError):
        return {}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gone(owner: dict[str, Any]) -> bool:
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _bury(path: Path, key: str, token: str) -> None:
    old = path.with_name(f".old.{key}.{uuid.uuid4().hex}")
    try:
        os.rename(path, old)
        if _owner(old).get("token", "") == token:
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, path)  # Another process was quicker, and this is its new claim.
    except OSError:
        pass


def _delete(path: Path, key: str) -> None:
    """Moves a folder aside before it is deleted, so that nobody sees it half deleted."""
    old = path.with_name(f".old.{key}.{uuid.uuid4().hex}")
    try:
        os.rename(path, old)
    except OSError:
        return
    shutil.rmtree(old, ignore_errors=True)
