"""`DistributedOptimizer`: a Keras optimizer whose gradients are those of all ranks.

Keras 3 calls `optimizer.apply` with the gradients of this process. Horovod's own optimizer waits
for `compute_gradients`, which Keras 3 never calls. Here the person's own optimizer object gets a
class made at run time, a subclass of the one it had, whose `apply` reduces first. State, settings
and variables stay what they were; name and module too, so that a saved model names a plain Keras
optimizer and loads without Horovod.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat
from tf_mp.hvd import variables as _variables
from tf_mp.hvd.accumulation import Accumulator
from tf_mp.hvd.basics import Average, Compression, ProcessSet, global_process_set
from tf_mp.hvd.reduction import Reducer
from tf_mp.hvd.settings import Settings, groups_from

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "distributed_in",
    "is_distributed",
]

_STATE = "_tf_mp_distribution"


class _State:
    """What belongs to one wrapped optimizer; a plain object that Keras does not track."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reducer = Reducer(settings)
        self.accumulator: Accumulator | None = None
        if settings.backward_passes_per_step > 1:
            self.accumulator = Accumulator(
                settings.backward_passes_per_step, settings.average_aggregated_gradients
            )
        self.reduced_outside = False


class _Distributed:
    """Methods of every wrapped optimizer; stands before the optimizer's own class."""

    @property
    def distribution(self) -> Settings:
        """How this optimizer reduces: `op`, `process_set`, `backward_passes_per_step`, ..."""
        return _state(self).settings

    def register_local_var(self, var: Any) -> None:
        """Makes a variable the rank's own: its gradient is not reduced."""
        self.distribution.local_variables.add(_variables.key(var))

    @tf.autograph.experimental.do_not_convert
    def reduce_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces gradients over the ranks and does nothing else.

        Args:
            gradients: one for each variable; None stays None.
            variables: the same list on every rank. A part of the optimizer's variables will do.
        """
        return _state(self).reducer(list(gradients), list(variables))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients over the ranks, then updates the variables."""
        state = _state(self)
        grads = list(grads)
        if not grads:
            return
        variables = _variables_of(self, trainable_variables)
        given = None if trainable_variables is None else variables
        plain_apply = super().apply  # type: ignore[misc]
        reduce = not state.reduced_outside

        def update(gradients: list[Any]) -> None:
            reduced = self.reduce_gradients(gradients, variables) if reduce else gradients
            plain_apply(reduced, given)

        def skip() -> None:
            _iterations(self).assign_add(1)

        if state.accumulator is None:
            update(grads)
        else:
            state.accumulator.run(grads, variables, last=update, other=skip)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Turns a Keras optimizer into one that reduces gradients over all ranks.

    Args:
        optimizer: any Keras optimizer, built or not, restored or not. It is changed and returned.
        name: name scope of the collectives; "Distributed" and the optimizer's class by default.
        device_dense: device on which dense gradients are reduced; each variable's own by default.
        device_sparse: the same for `IndexedSlices`.
        compression: how gradients travel: `Compression.none` or `Compression.fp16`.
        sparse_as_dense: reduces `IndexedSlices` as dense tensors.
        gradient_predivide_factor: divides by this before the sum, and by size / this after it.
        op: `Average`, `Sum` or `Adasum`.
        backward_passes_per_step: gradients that each rank adds up before they are reduced.
        average_aggregated_gradients: divides that sum by their number.
        num_groups: Horovod's old name of a number of `groups`.
        groups: number of groups, or lists of variables that are reduced together.
        process_set: the ranks that take part.
        scale_local_gradients: divides the gradients of local variables by the number of ranks.

    Returns:
        The same object, now an instance of a subclass of its class.

    Raises:
        ValueError: arguments that cannot be meant, or an optimizer that is wrapped already.
        TypeError: something else than a Keras optimizer.
    """
    _check_optimizer(optimizer)
    settings = Settings(
        name=name or f"Distributed{type(optimizer).__name__}",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups_from(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return _wrap(optimizer, settings)


def PartialDistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: int | list[list[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedOptimizer` that leaves the gradients of some layers to each rank.

    Args:
        optimizer: as for `DistributedOptimizer`, like all arguments that are not named here.
        name: as there.
        device_dense: as there.
        device_sparse: as there.
        compression: as there.
        sparse_as_dense: as there.
        gradient_predivide_factor: as there.
        op: as there.
        groups: as there.
        process_set: as there.
        local_layers: a built layer, or several, whose gradients are not reduced.
        scale_local_gradients: as there.
    """
    variables = variables_of_layers(local_layers)
    wrapped = DistributedOptimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        wrapped.register_local_var(variable)
    return wrapped


def variables_of_layers(layers: Any) -> list[Any]:
    """The trainable weights of a layer or of several built layers.

    Raises:
        ValueError: something else than layers, or a layer that has no weights yet.
    """
    listed = [layers] if isinstance(layers, keras.layers.Layer) else list(layers or [])
    for layer in listed:
        if not isinstance(layer, keras.layers.Layer) or not layer.built:
            raise ValueError(
                f"Received: local_layers={listed!r}. Expected: built Keras layers; build the "
                "model first, for instance with model.build(input_shape)."
            )
    return [weight for layer in listed for weight in layer.trainable_weights]


def is_distributed(optimizer: Any) -> bool:
    """Whether this optimizer itself was wrapped by `DistributedOptimizer`."""
    return isinstance(optimizer, _Distributed)


def distributed_in(optimizer: Any) -> Any:
    """The wrapped optimizer: the given one, or the one within a `LossScaleOptimizer`; or None."""
    while optimizer is not None and not is_distributed(optimizer):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


@contextlib.contextmanager
def gradients_are_reduced(optimizer: Any) -> Iterator[None]:
    """Within it a wrapped optimizer takes the gradients for reduced ones."""
    state = _state(optimizer)
    state.reduced_outside = True
    try:
        yield
    finally:
        state.reduced_outside = False


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"Received: {type(optimizer).__module__}.{type(optimizer).__name__}. Expected: an "
            "optimizer of keras.optimizers (Keras 3)."
        )
    if distributed_in(optimizer) is not None:
        raise ValueError(
            f"Received: {optimizer.name}, which is wrapped by DistributedOptimizer already. "
            "Expected: a plain optimizer; wrapping changes the object itself. Wrap it once, and "
            "give each model an optimizer of its own."
        )


def _wrap(optimizer: Any, settings: Settings) -> Any:
    inner = type(optimizer)
    members = {"__module__": inner.__module__, "__qualname__": inner.__qualname__}
    wrapped = type(inner.__name__, (_Distributed, inner), {**members, "__doc__": inner.__doc__})
    compat.serialise_as(wrapped, inner)
    optimizer.__class__ = wrapped
    object.__setattr__(optimizer, _STATE, _State(settings))
    return optimizer


def _state(optimizer: Any) -> _State:
    return optimizer.__dict__[_STATE]


def _variables_of(optimizer: Any, given: Any) -> list[Any]:
    """The variables that `apply` was called for, and the optimizer built for them."""
    if given is None:
        return list(compat.trainable_variables_of(optimizer))
    given = list(given)
    if not optimizer.built:
        compat.build_outside(optimizer, given)
    return given


def _iterations(optimizer: Any) -> Any:
    """The step counter of an optimizer, or of the one within a `LossScaleOptimizer`."""
    return compat.step_counter(getattr(optimizer, "inner_optimizer", optimizer))
