"""The best model, written by the root rank alone."""

from typing import Any

import keras

from tf_mp.hvd.basics import rank

__all__ = ["BestModelCheckpoint"]


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` of the best model, on the root rank only.

    As in Horovod the file's name may be set later, as the attribute `filepath`. Put
    `MetricAverageCallback` before it, so that the root judges by the metrics of all ranks.

    Args:
        monitor: the value that says what is best.
        verbose: as in `keras.callbacks.ModelCheckpoint`, like all below.
        save_weights_only: as there.
        mode: as there.
        save_freq: as there.
        filepath: the file; must end in `.keras`, or `.weights.h5` with `save_weights_only`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=filepath or f"unset{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that there is a file to write to.

        Raises:
            ValueError: no file's name.
        """
        if self.filepath is None:
            raise ValueError(
                "Received: BestModelCheckpoint without a file. Expected: a path; set "
                "`callback.filepath = 'best.keras'` before fit."
            )
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves after some batches, where `save_freq` says so, on the root rank."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves the best model so far, on the root rank."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)
