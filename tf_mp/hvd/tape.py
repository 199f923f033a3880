"""`DistributedGradientTape`: for own training loops, gradients reduced over all ranks."""

from typing import Any

import keras
import tensorflow as tf

from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import Average, Compression, ProcessSet, global_process_set
from tf_mp.hvd.optimizer import variables_of_layers
from tf_mp.hvd.reduction import Reducer
from tf_mp.hvd.settings import Settings, groups_from

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]


class _Distributed:
    """Methods of every wrapped tape; stands before the tape's own class."""

    _reducer: Reducer

    def register_local_source(self, source: Any) -> None:
        """Makes a variable the rank's own: its gradient is not reduced."""
        self._reducer.settings.local_variables.add(_variables.key(source))

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of `target`, reduced over the ranks, in the structure of `sources`.

        Args:
            target: what is differentiated, as for `tf.GradientTape.gradient`.
            sources: a variable or a structure of variables, the same on every rank.
            output_gradients: as there.
            use_generic_names: names the collectives by position and not by the variables' paths,
                for ranks whose variables have different names.
            unconnected_gradients: as there.
        """
        local = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        listed = keras.tree.flatten(sources)
        gradients = keras.tree.flatten(local)
        names = [f"grad_{i}" for i in range(len(listed))] if use_generic_names else None
        reduced = self._reducer(gradients, listed, names)
        return keras.tree.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        """Pairs of variable and gradient: those of local variables, and the reduced ones."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        local: list[Any] = []
        common: list[Any] = []
        for source, gradient in zip(sources, gradients, strict=True):
            pairs = local if self._reducer.settings.is_local(source) else common
            pairs.append((source, gradient))
        return local, common


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Turns a tape into one whose `gradient` reduces over all ranks.

    Args:
        gradtape: the tape, before or after it recorded. It is changed and returned.
        device_dense: as for `DistributedOptimizer`, like all arguments below.
        device_sparse: as there.
        compression: as there.
        sparse_as_dense: as there.
        op: as there.
        gradient_predivide_factor: as there.
        num_groups: as there.
        groups: as there.
        process_set: as there.
        scale_local_gradients: as there.

    Raises:
        ValueError: arguments that cannot be meant, or a tape that is wrapped already.
    """
    if isinstance(gradtape, _Distributed):
        raise ValueError(  # noqa: TRY004 (the type is right; it is wrapped twice)
            "Received: a tape that is wrapped by DistributedGradientTape already. Expected: a "
            "plain tf.GradientTape; wrapping changes the object itself."
        )
    settings = Settings(
        name="DistributedGradientTape",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups_from(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    inner = type(gradtape)
    members = {"__module__": inner.__module__, "__doc__": inner.__doc__}
    gradtape.__class__ = type(inner.__name__, (_Distributed, inner), members)
    gradtape._reducer = Reducer(settings)
    return gradtape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape` that leaves the gradients of some layers to each rank.

    Args:
        gradtape: as for `DistributedGradientTape`, like all arguments that are not named here.
        device_dense: as there.
        device_sparse: as there.
        compression: as there.
        sparse_as_dense: as there.
        op: as there.
        gradient_predivide_factor: as there.
        num_groups: as there.
        groups: as there.
        process_set: as there.
        local_layers: a built layer, or several, whose gradients are not reduced.
        scale_local_gradients: as there.
    """
    variables = variables_of_layers(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        tape.register_local_source(variable)
    return tape
