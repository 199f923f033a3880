"""Reading `state.json` of a checkpoint, which a person or a crash may have changed."""

import json
from pathlib import Path
from typing import Any

__all__ = ["read"]

_KINDS: dict[str, Any] = {
    "step": int,
    "seeds": list,
    "shapes": list,
    "optimizer": str | None,
    "score": int | float,
    "configuration": object,
    "model_sha256": str,
}


def read(path: Path) -> dict[str, Any]:
    """Returns what a `state.json` holds.

    Args:
        path: the file.

    Raises:
        ValueError: it is no JSON, or an entry is missing or of another kind than was written.
        OSError: it cannot be read.
    """
    try:
        state = json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} holds {type(state).__name__}, not the entries of a state")
    wrong = [
        name for name, kind in _KINDS.items()
        if name not in state or not isinstance(state[name], kind) or state[name] is True
    ]
    if wrong or state["step"] < 0:
        names = ", ".join(wrong or ["step"])
        raise ValueError(f"{path.name} lacks {names}, or has it of another kind")
    return state
