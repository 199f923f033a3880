"""Model and data parallelism for Keras: the public names, loaded when first used."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tf_mp.checkpoint import CheckpointCallback
    from tf_mp.devices import init
    from tf_mp.models import build_model
    from tf_mp.pipeline import Pipeline, pipeline_of
    from tf_mp.placement import verify_placement
    from tf_mp.split import parallelize
    from tf_mp.world import World
    from tf_mp.world import current as current_world

__all__ = [
    "CheckpointCallback",
    "Pipeline",
    "World",
    "build_model",
    "current_world",
    "init",
    "parallelize",
    "pipeline_of",
    "verify_placement",
]
__version__ = "0.1.0"

# TensorFlow reads this switch once, when it is imported. On AMD's CPUs it leaves oneDNN off.
# Its informational lines, printed once a rank, would drown ours.
if "tensorflow" not in sys.modules:
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

_HOMES = {
    "CheckpointCallback": ("checkpoint", "CheckpointCallback"),
    "Pipeline": ("pipeline", "Pipeline"),
    "World": ("world", "World"),
    "build_model": ("models", "build_model"),
    "current_world": ("world", "current"),
    "init": ("devices", "init"),
    "parallelize": ("split", "parallelize"),
    "pipeline_of": ("pipeline", "pipeline_of"),
    "verify_placement": ("placement", "verify_placement"),
}


def __getattr__(name: str) -> Any:
    """Imports the module that holds a public name when the name is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tf_mp' has no attribute {name!r}; it has {__all__}.")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(f"tf_mp.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *__all__})
