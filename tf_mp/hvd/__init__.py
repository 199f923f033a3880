"""`horovod.tensorflow.keras`, right on Keras 3: the same names, arguments, defaults and meaning.

Change one line of a Horovod Keras script: `import tf_mp.hvd as hvd`. What Horovod has besides
(such as `hvd.grouped_allreduce` or `hvd.join`) is found here too, and is Horovod's own.
"""

from typing import Any

import horovod.tensorflow as _horovod

from tf_mp.hvd import callbacks, elastic
from tf_mp.hvd import guard as _guard
from tf_mp.hvd import patches as _patches
from tf_mp.hvd.basics import *  # noqa: F403
from tf_mp.hvd.basics import __all__ as _basics
from tf_mp.hvd.batch_norm import SyncBatchNormalization
from tf_mp.hvd.collectives import *  # noqa: F403
from tf_mp.hvd.collectives import __all__ as _collectives
from tf_mp.hvd.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    distributed_in,
    is_distributed,
)
from tf_mp.hvd.saving import load_model
from tf_mp.hvd.state import average_state
from tf_mp.hvd.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "average_state",
    "callbacks",
    "distributed_in",
    "elastic",
    "is_distributed",
    "load_model",
]
__all__ += [*_basics, *_collectives]  # noqa: PLE0604 (both are lists of strings)

_patches.install()
_guard.watch()


def __getattr__(name: str) -> Any:
    """Horovod's own function where this module has none of that name."""
    if name.startswith("_"):
        raise AttributeError(f"module 'tf_mp.hvd' has no attribute {name!r}.")
    try:
        return getattr(_horovod, name)
    except AttributeError:
        raise AttributeError(
            f"module 'tf_mp.hvd' has no attribute {name!r}, nor has horovod.tensorflow."
        ) from None
