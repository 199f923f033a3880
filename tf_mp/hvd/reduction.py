"""Gradients of all ranks become one: reduced by device, in groups, under lasting names.

Gradients are put into groups in the reverse order of their variables, which is about the order in
which the backward pass makes them. One group is one fused collective; it starts as soon as its
last gradient is there, while the rest of the backward pass goes on. A group ends at `GROUP_BYTES`.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import horovod.tensorflow as _horovod
import tensorflow as tf

from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import Adasum, Average, nccl_built
from tf_mp.hvd.settings import Settings

__all__ = ["GROUP_BYTES", "device_of", "reduce"]

GROUP_BYTES = 32 * 2**20
"""Bytes of gradients after which a group is closed."""

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


def reduce(
    settings: Settings,
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    names: Sequence[str] | None = None,
) -> list[Gradient]:
    """Reduces gradients over the ranks; it changes nothing else.

    Args:
        settings: how.
        gradients: one for each variable; None stays None.
        variables: Keras or TensorFlow variables, the same list on every rank.
        names: a name for each variable; their paths by default.

    Returns:
        The reduced gradients, in the given order; local variables keep their own.
    """
    if not settings.reduces:
        return list(gradients)
    names = names or [_variables.path(variable) for variable in variables]
    with tf.name_scope(f"{settings.name}_Allreduce"):
        reduced = list(gradients)
        dense: list[int] = []
        for position, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if settings.is_local(variable):
                reduced[position] = _local(settings, gradient)
            elif isinstance(gradient, tf.IndexedSlices) and not settings.sparse_as_dense:
                reduced[position] = _sparse(settings, gradient, variable, names[position])
            else:
                dense.append(position)
        for group in _groups(settings, dense, gradients, variables):
            chosen = [tf.convert_to_tensor(gradients[position]) for position in group]
            with tf.device(_device(settings.device_dense, variables[group[0]])):
                results = _dense(settings, chosen, [names[position] for position in group])
            for position, result in zip(group, results, strict=True):
                reduced[position] = result
    return reduced


def _groups(
    settings: Settings, positions: list[int], gradients: Sequence[Any], variables: Sequence[Any]
) -> list[list[int]]:
    """Positions of dense gradients by group; a group has one device and one dtype."""
    groups: list[list[int]] = []
    for asked in _asked_groups(settings, positions, variables):
        by_kind: dict[tuple[str, str], list[list[int]]] = {}
        sizes: dict[tuple[str, str], int] = {}
        for position in asked:
            dtype = gradients[position].dtype
            kind = (_device(settings.device_dense, variables[position]), dtype.name)
            size = dtype.size * (gradients[position].shape.num_elements() or 0)
            full = settings.groups is None and sizes.get(kind, 0) + size > GROUP_BYTES
            if kind not in by_kind or full:
                by_kind.setdefault(kind, []).append([])
                sizes[kind] = 0
            by_kind[kind][-1].append(position)
            sizes[kind] += size
        groups.extend(group for of_kind in by_kind.values() for group in of_kind)
    return groups


def _asked_groups(
    settings: Settings, positions: list[int], variables: Sequence[Any]
) -> Iterable[list[int]]:
    """The groups that the person asked for, before they are split by device and dtype."""
    if settings.groups is None:
        return [positions[::-1]]
    if isinstance(settings.groups, int):
        count = min(settings.groups, len(positions)) or 1
        ends = [len(positions) * k // count for k in range(count + 1)]
        return [positions[a:b] for a, b in itertools.pairwise(ends)]
    of_variable = {_variables.key(variables[position]): position for position in positions}
    listed = [
        [of_variable.pop(key) for key in map(_variables.key, group) if key in of_variable]
        for group in settings.groups
    ]
    return [*(group for group in listed if group), *([left] for left in of_variable.values())]


def device_of(own: str) -> str:
    """Where the gradient of a variable on the device `own` is reduced.

    There; but several GPUs of one process under NCCL can wait for each other for ever
    (horovod#2944), so there all reductions of a process go through its first GPU.
    """
    if "GPU" in own and nccl_built():
        return own.rpartition(":")[0] + ":0"
    return own


def _device(asked: str, variable: Any) -> str:
    """Where a gradient is reduced: as asked, or by where its variable lies."""
    return asked or device_of(_variables.device(variable))


def _dense(settings: Settings, gradients: list[tf.Tensor], names: list[str]) -> list[tf.Tensor]:
    """One fused collective for a group of dense gradients."""
    factor = settings.gradient_predivide_factor
    arguments = {
        "compression": settings.compression,
        "op": settings.op,
        "prescale_factor": 1.0 / factor,
        "postscale_factor": factor,
        "process_set": settings.process_set,
        "ignore_name_scope": True,
    }
    if settings.op == Adasum:
        # Horovod asks a new process for GPUs where a tensor does not say that it is on a CPU.
        gradients = [tf.identity(gradient) for gradient in gradients]
    if len(gradients) == 1 or settings.op == Adasum:
        # Adasum weighs each tensor by itself.
        pairs = zip(gradients, names, strict=True)
        return [
            _horovod.allreduce(g, name=_variables.operation_name("allreduce", [n]), **arguments)
            for g, n in pairs
        ]
    name = _variables.operation_name("allreduce", names)
    return list(_horovod.grouped_allreduce(gradients, name=name, **arguments))


def _sparse(
    settings: Settings, gradient: tf.IndexedSlices, variable: Any, path: str
) -> tf.IndexedSlices:
    """Slices of all ranks, one after the other: their sum is the sum of the gradients."""
    if settings.op == Adasum:
        raise ValueError(
            f"Received: op=Adasum with IndexedSlices for {path}. Expected: "
            "dense gradients. Pass sparse_as_dense=True."
        )

    def gather(tensor: tf.Tensor, part: str) -> tf.Tensor:
        name = _variables.operation_name(f"allgather_{part}", [path])
        return _horovod.allgather(
            tensor, name=name, ignore_name_scope=True, process_set=settings.process_set
        )

    with tf.device(_device(settings.device_sparse, variable)):
        values = gather(gradient.values, "values")
        indices = gather(gradient.indices, "indices")
        if settings.op == Average:
            values = values / tf.cast(settings.ranks(values.dtype), values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=gradient.dense_shape)


def _local(settings: Settings, gradient: Any) -> Any:
    """The gradient of a variable that each rank keeps for itself.

    The loss that all ranks minimise together is the mean over ranks, of which a rank's own part
    has this share (horovod#3695).
    """
    if not settings.scale_local_gradients:
        return gradient
    dense = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    scaled = dense / tf.cast(settings.ranks(dense.dtype), dense.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled, gradient.indices, dense_shape=gradient.dense_shape)
    return scaled


class Reducer:
    """`reduce` with one set of settings, within a function or eagerly.

    Eagerly the collectives would follow one another; a function, kept for each list of variables,
    lets them be under way at the same time and gives them their names.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(
        self,
        gradients: Sequence[Gradient],
        variables: Sequence[Any],
        names: Sequence[str] | None = None,
    ) -> list[Gradient]:
        """Reduces gradients over the ranks, in the given order; None stays None."""
        if not tf.executing_eagerly() or not self.settings.reduces:
            return reduce(self.settings, gradients, variables, names)
        present = [position for position, g in enumerate(gradients) if g is not None]
        chosen = [variables[position] for position in present]
        names = names or [_variables.path(variable) for variable in variables]
        function = _function(self.settings, chosen, [names[position] for position in present])
        results = function([gradients[position] for position in present])
        reduced = list(gradients)
        for position, result in zip(present, results, strict=True):
            reduced[position] = result
        return reduced


def _function(settings: Settings, variables: list[Any], names: list[str]) -> Any:
    """The function that reduces these gradients; the last ones used are kept.

    An eager loop makes a new tape, with new settings, at each step.
    """
    key = (settings.key, tuple(map(_variables.key, variables)), tuple(names))
    if key not in _functions:

        @tf.function(autograph=False, reduce_retracing=True)
        def function(gradients: list[Any]) -> list[Gradient]:
            return reduce(settings, gradients, variables, names)

        _functions[key] = function
        if len(_functions) > _FUNCTIONS_KEPT:
            _functions.pop(next(iter(_functions)))
    return _functions[key]


_FUNCTIONS_KEPT = 32
_functions: dict[Any, Any] = {}
