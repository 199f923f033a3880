"""The arguments of `DistributedOptimizer` and of the tape, checked once and then fixed."""

import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import (
    Adasum,
    Average,
    Compression,
    ProcessSet,
    Sum,
    global_process_set,
    rocm_built,
)

__all__ = ["Settings"]

_OPS = {Average: "Average", Sum: "Sum", Adasum: "Adasum"}


@dataclass(frozen=True)
class Settings:
    """How gradients are reduced over ranks.

    Attributes:
        name: name scope of the collectives.
        device_dense: device of the collectives of dense gradients; empty: each variable's own.
        device_sparse: the same for `IndexedSlices`.
        compression: how gradients travel, of `Compression`.
        sparse_as_dense: whether `IndexedSlices` become dense tensors first.
        gradient_predivide_factor: splits the division of a mean before and after the sum.
        op: `Average`, `Sum` or `Adasum`.
        backward_passes_per_step: gradients added up on a rank before they are reduced.
        average_aggregated_gradients: whether that sum is divided by their number.
        groups: a number of groups, or lists of variables; None: groups by device and size.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local variables are divided by the number of
            ranks.
        local_variables: keys of the variables that each rank keeps for itself.
    """

    name: str = "Distributed"
    device_dense: str = ""
    device_sparse: str = ""
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    op: int = Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    groups: int | list[list[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    local_variables: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Refuses what cannot be meant, with what was received and what is expected."""
        if self.op not in _OPS:
            raise ValueError(f"Received: op={self.op}. Expected: {_names(_OPS)}.")
        if self.gradient_predivide_factor <= 0 or (
            self.gradient_predivide_factor != 1.0 and (self.op != Average or rocm_built())
        ):
            raise ValueError(
                f"Received: gradient_predivide_factor={self.gradient_predivide_factor} with "
                f"op={_OPS[self.op]}. Expected: a positive factor with op=Average, 1.0 on ROCm."
            )
        if self.backward_passes_per_step < 1:
            raise ValueError(
                f"Received: backward_passes_per_step={self.backward_passes_per_step}. "
                "Expected: 1 or more."
            )
        if self.op == Adasum and self.average_aggregated_gradients:
            raise ValueError(
                "Received: op=Adasum with average_aggregated_gradients=True. Expected: one of "
                "them, for Adasum chooses the length of the sum itself."
            )
        if self.op == Adasum and self.process_set.process_set_id != 0:
            raise ValueError(
                f"Received: op=Adasum with {self.process_set}. Expected: the global process set, "
                "the only one over which Horovod has Adasum."
            )
        self._check_groups()

    def _check_groups(self) -> None:
        good = self.groups is None or isinstance(self.groups, list)
        if not good and not (isinstance(self.groups, int) and self.groups > 0):
            raise ValueError(
                f"Received: groups={self.groups!r}. Expected: a number of groups above 0, or a "
                "list of lists of variables."
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for settings that reduce in the same way."""
        groups = self.groups
        if isinstance(groups, list):
            groups = tuple(tuple(map(_variables.key, group)) for group in groups)  # type: ignore
        return (
            self.name,
            self.device_dense,
            self.device_sparse,
            self.compression,
            self.sparse_as_dense,
            self.gradient_predivide_factor,
            self.op,
            groups,
            self.process_set.process_set_id,
            self.scale_local_gradients,
            frozenset(self.local_variables),
        )

    @property
    def reduces(self) -> bool:
        """Whether this process has anyone to reduce with.

        Under Horovod's elastic launcher the number of ranks changes while one traced function
        lives on, so there the collectives are always part of it.
        """
        if elastic():
            return True
        return bool(self.process_set.included()) and (self.process_set.size() or 1) > 1

    def is_local(self, variable: Any) -> bool:
        """Whether each rank keeps this variable for itself."""
        return _variables.key(variable) in self.local_variables

    def ranks(self, dtype: tf.DType) -> Any:
        """The number of ranks that take part, as a number or, when it may change, a tensor."""
        if not elastic():
            return self.process_set.size()
        from horovod.tensorflow import size_op

        return tf.cast(size_op(process_set_id=self.process_set.process_set_id), dtype)


def elastic() -> bool:
    """Whether Horovod's elastic launcher started this process."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


def groups_from(num_groups: int, groups: int | list[list[Any]] | None) -> Any:
    """`groups`, or the older `num_groups` where only that is given."""
    if num_groups == 0:
        return groups
    warnings.warn(
        f"Received: num_groups={num_groups}. Horovod renamed it: use groups.",
        DeprecationWarning,
        stacklevel=3,
    )
    return num_groups if groups is None else groups


def _names(ops: dict[int, str]) -> str:
    return ", ".join(f"hvd.{name} ({number})" for number, name in ops.items())
