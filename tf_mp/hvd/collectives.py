"""Collectives on plain values and on Keras variables, eager or within a function."""

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as tf

from tf_mp import world
from tf_mp.hvd import variables as _variables
from tf_mp.hvd.basics import Average, Compression, ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "reducescatter",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> tf.Tensor:
    """Reduces a value over all ranks; the mean unless `op` says otherwise.

    Args:
        value: anything that becomes a tensor, of the same shape on every rank.
        name: name of the collective; the same on every rank.
        average: Horovod's old way to ask for a sum (False); use `op`.
        prescale_factor: multiplies the value before it is reduced.
        postscale_factor: multiplies the result.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`; `Average` when None.
        compression: how the value travels, of `Compression`.
    """
    return _horovod.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
        name=name,
    )


def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Joins the values of all ranks along their first dimension, in rank order."""
    return _horovod.allgather(tf.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Gives every rank the root rank's value, which has the same shape on every rank."""
    return _horovod.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> tf.Tensor:
    """Reduces a value over all ranks and gives each rank its share of the first dimension."""
    return _horovod.reducescatter(tf.convert_to_tensor(value), name=name, op=op)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuses: Keras 3 keeps no list of global variables.

    Raises:
        RuntimeError: always, with the two ways that work.
    """
    raise RuntimeError(
        f"Received: broadcast_global_variables({root_rank}). Expected: variables by name, for "
        "TensorFlow 2 keeps no list of global ones. Call hvd.broadcast_variables("
        "model.variables + model.optimizer.variables, root_rank), or give fit the callback "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)."
    )


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Gives the variables of every rank the values of the root rank.

    Args:
        variables: Keras or TensorFlow variables, in the same order on every rank.
        root_rank: the rank whose values are sent.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake; the result is the same.

    Raises:
        ValueError: on every rank, where the ranks' lists differ in a name, shape or dtype.
    """
    del inplace
    listed = list(variables)
    if not listed or process_set.size() == 1:
        return
    if process_set.process_set_id == 0:
        _check_same_on_all_ranks(listed)
    _broadcast_all(listed, root_rank, process_set)


def _check_same_on_all_ranks(variables: list[Any]) -> None:
    """Names the first variable that is not the same on all ranks, before anything is sent."""
    mine = [[_variables.path(v), list(v.shape), str(v.dtype)] for v in variables]
    lists = world.exchange(mine, what="the variables to broadcast")
    for position in range(max(map(len, lists))):
        found = [names[position] if position < len(names) else None for names in lists]
        if any(one != found[0] for one in found):
            ranks = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
            raise ValueError(
                f"Received: variable {position} that differs between ranks ({ranks}). Expected: "
                "the same model and optimizer on every rank, built in the same order. Names made "
                "by Keras count upwards: build no extra layers on one rank only, or name them."
            )


def _broadcast_all(variables: list[Any], root_rank: int, process_set: ProcessSet) -> None:
    """All broadcasts in one function, so that they are under way at the same time."""

    @tf.function(autograph=False)
    def run() -> None:
        for variable in variables:
            tensor = _variables.tensor_of(variable)
            name = _variables.operation_name("broadcast", [_variables.path(variable)])
            with tf.device(tensor.device):
                value = _horovod.broadcast(
                    tensor.read_value(),
                    root_rank,
                    name=name,
                    ignore_name_scope=True,
                    process_set=process_set,
                )
                tensor.assign(value)

    run()
