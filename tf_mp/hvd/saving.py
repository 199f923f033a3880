"""Models whose saved optimizer goes on as a distributed one."""

from typing import Any

import keras

from tf_mp import compat
from tf_mp.hvd.basics import Compression
from tf_mp.hvd.batch_norm import SyncBatchNormalization
from tf_mp.hvd.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Loads a saved Keras model and wraps its optimizer, with its state.

    Batch normalisation that was saved as synchronised is so over all ranks again.

    Args:
        filepath: a `.keras` or `.h5` file, saved with or without Horovod.
        custom_optimizers: optimizer classes of the person's own that the file may name.
        custom_objects: names and what they stand for, as for `keras.models.load_model`.
        compression: how gradients travel, of `Compression`.
        legacy_opts: Keras 3 has no legacy optimizers: only False.

    Raises:
        ValueError: `legacy_opts=True`.
    """
    if legacy_opts:
        raise ValueError(
            "Received: legacy_opts=True. Expected: False, for Keras 3 has no legacy optimizers; "
            "save the model again with one of keras.optimizers."
        )
    named = {cls.__name__: cls for cls in custom_optimizers or []}
    model = keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    for layer in compat.layers_within(model):
        if type(layer) is keras.layers.BatchNormalization and layer.synchronized:
            layer.__class__ = SyncBatchNormalization
    if getattr(model, "optimizer", None) is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
        model.make_train_function(force=True)
    return model
