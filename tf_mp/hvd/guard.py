"""One warning where Horovod's own Keras modules are imported beside this one."""

import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["watch"]

_MADE_FOR_KERAS_2 = ("horovod.tensorflow.keras", "horovod.keras")


class _Watcher:
    """Sees each import, warns once, and finds nothing itself."""

    warned = False

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _MADE_FOR_KERAS_2:
            cls.warn(fullname)
        return None

    @classmethod
    def warn(cls, name: str) -> None:
        if cls.warned:
            return
        cls.warned = True
        warnings.warn(
            f"{name} is made for Keras 2: under Keras 3 its callbacks fail and its optimizer "
            f"does not average gradients. Replace `import {name} as hvd` by "
            "`import tf_mp.hvd as hvd`.",
            stacklevel=2,
        )


def watch() -> None:
    """Warns once if Horovod's Keras modules are, or later become, imported."""
    finders: list[Any] = sys.meta_path
    if _Watcher not in finders:
        finders.insert(0, _Watcher)
    for name in _MADE_FOR_KERAS_2:
        if name in sys.modules:
            _Watcher.warn(name)
