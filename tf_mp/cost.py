"""Measured milliseconds and bytes of each operation of a model.

Each operation is timed as a stage of its own (`timing.py`), so that no device ever holds more
than one operation's weights and the tensors that are still needed. One layer that stands in a
model many times with equal settings and shapes is measured once. Ranks must not choose different
cuts, so the root rank measures and tells the others (`measured`).
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_mp import affinity, balance, devices, timing, world
from tf_mp.graph import Graph, Operation

__all__ = [
    "OperationCost",
    "as_balance",
    "for_partition",
    "from_root",
    "measure",
    "measured",
    "needs_gradient",
    "num_bytes",
    "sample_of",
]

CACHE_VARIABLE = "TF_MP_COST_CACHE"
_SAMPLES = 16  # where the micro-batch size is not known yet
_OPEN = 32  # for a dimension that the model leaves open


class OperationCost(NamedTuple):
    """What one operation costs for one micro-batch.

    Attributes:
        name: The operation's name in the graph.
        forward_ms: Time of its forward.
        backward_ms: Time of its backward.
        weight_bytes: Its trainable weights; 0 at the second use of a layer.
        state_bytes: Its other variables; 0 at the second use of a layer.
        output_bytes: For each of its outputs, the bytes of the tensor.
    """

    name: str
    forward_ms: float
    backward_ms: float
    weight_bytes: int
    state_bytes: int
    output_bytes: tuple[int, ...]

    @property
    def cost_ms(self) -> float:
        """Time of forward and backward."""
        return self.forward_ms + self.backward_ms


def measure(
    graph: Graph, sample: Sequence[Any], device: str, repeats: int = 5
) -> list[OperationCost]:
    """Measures every operation of a graph, on this rank.

    Args:
        graph: The traced model.
        sample: Its flat inputs for one micro-batch, (micro_batch, ...) each, or None for an
            absent one; `sample_of` makes some.
        device: Where to run.
        repeats: Runs of each, of which the quickest counts.

    Returns:
        One cost an operation, in the graph's order.
    """
    needed = needs_gradient(graph)
    last_use = {key: i for i, op in enumerate(graph.operations) for key in op.inputs}
    values = {key: (tensor, None) for key, tensor in zip(graph.inputs, sample, strict=True)}
    seen: set[int] = set()
    known: dict[str, tuple[float, float]] = {}
    costs = []
    for i, operation in enumerate(graph.operations):
        pairs = [values[key] for key in operation.inputs]
        run = timing.StageRun(
            timing.alone(operation, device), [t for t, _ in pairs], [m for _, m in pairs]
        )
        wanted = [key in needed for key in operation.inputs]
        kind = _kind(operation, pairs, wanted)
        if kind not in known:
            known[kind] = run.times_ms(wanted, repeats)[:2]
        new = [v for v in operation.variables if id(v) not in seen]
        seen.update(map(id, new))
        weight_bytes = sum(num_bytes(v) for v in new if v.trainable)
        state_bytes = sum(num_bytes(v) for v in new if not v.trainable)
        made = tuple(map(num_bytes, run.outputs))
        costs.append(OperationCost(operation.name, *known[kind], weight_bytes, state_bytes, made))
        made_pairs = zip(run.outputs, run.masks, strict=True)
        values.update(zip(operation.outputs, made_pairs, strict=True))
        for key in {*operation.inputs, *operation.outputs}:
            if last_use.get(key, -1) <= i:
                del values[key]
    return costs


def measured(
    graph: Graph,
    sample: Sequence[Any],
    *,
    device: str,
    num_devices: int = 1,
    repeats: int = 5,
    cache: str | os.PathLike[str] | None = None,
) -> list[OperationCost]:
    """The costs as the root rank measures them; every rank must call it.

    Args:
        graph: As for `measure`.
        sample: As for `measure`.
        device: As for `measure`.
        num_devices: How many devices of this rank will work at once; CPU devices share its cores.
        repeats: As for `measure`.
        cache: A JSON file that keeps what was measured, by model, shapes, device and versions; by
            default the one that TF_MP_COST_CACHE names, if it names one.

    Raises:
        RuntimeError: on every other rank, if measuring failed on the root rank.
    """
    path = cache or os.environ.get(CACHE_VARIABLE)
    num_cores = affinity.cores_of_device(device, num_devices)

    def measure_here() -> list[OperationCost]:
        with affinity.limited_to(num_cores):
            return measure(graph, sample, device, repeats)

    def through_cache() -> Any:
        if not path:
            return measure_here()
        return _kept(Path(path), _digest(graph, sample, device, num_cores), measure_here)

    rows = from_root("the measured costs of operations", through_cache)
    return [_from_row(row) for row in rows]


def from_root(what: str, measure_here: Callable[[], Any]) -> Any:
    """What the root rank measured, as JSON gives it back; every rank must call it.

    Args:
        what: What is measured, in words.
        measure_here: Called on the root rank only.

    Raises:
        RuntimeError: on every other rank, if it failed on the root rank.
    """
    answer: dict[str, Any] = {}
    failure: Exception | None = None
    if world.current().is_root:
        try:
            answer["measured"] = measure_here()
        except Exception as error:  # the other ranks wait for the answer
            failure = error
            answer["error"] = f"{type(error).__name__}: {error}"
    answer = world.broadcast(answer, what=what)
    if failure is not None:
        raise failure
    if "error" in answer:
        raise RuntimeError(f"The root rank could not measure the model: {answer['error']}")
    return answer["measured"]


def for_partition(graph: Graph, stages: int) -> list[balance.Operation]:
    """Measures a graph for `cuts="auto"`; every rank must call it.

    Args:
        graph: The traced model.
        stages: Number of stages wanted; 1 needs no measurement.
    """
    sample = sample_of(graph, _SAMPLES)
    owned = devices.owned()
    count = min(stages, len(owned))
    return as_balance(graph, measured(graph, sample, device=owned[0], num_devices=count))


def as_balance(graph: Graph, costs: Sequence[OperationCost]) -> list[balance.Operation]:
    """What `partition.automatic` needs: with the bytes that cross after each operation."""
    size = {
        key: count
        for op, cost in zip(graph.operations, costs, strict=True)
        for key, count in zip(op.outputs, cost.output_bytes, strict=True)
    }
    last_use = {key: i for i, op in enumerate(graph.operations) for key in op.inputs}
    crossing, rows = 0, []
    for i, (operation, cost) in enumerate(zip(graph.operations, costs, strict=True)):
        crossing += sum(size[key] for key in operation.outputs if last_use.get(key, -1) > i)
        crossing -= sum(size.get(key, 0) for key in operation.inputs if last_use[key] == i)
        rows.append(
            balance.Operation(
                cost.name,
                cost.cost_ms,
                cross_bytes=crossing,
                weight_bytes=cost.weight_bytes,
                activation_bytes=sum(cost.output_bytes),
            )
        )
    return rows


def sample_of(graph: Graph, micro_batch: int) -> list[tf.Tensor]:
    """Made-up flat inputs of a model, the same each time: noise, and ones for integers.

    Args:
        graph: The traced model.
        micro_batch: Number of samples. Other dimensions that the model leaves open are 32.
    """
    draw = np.random.default_rng(0)  # not Keras's: measuring must not move the person's seeds
    made = []
    for symbol in graph.function.inputs:
        shape = [micro_batch, *(_OPEN if size is None else size for size in symbol.shape[1:])]
        dtype = tf.as_dtype(symbol.dtype)
        noise = draw.random(shape, np.float32) if dtype.is_floating else np.ones(shape)
        made.append(tf.constant(noise, dtype))
    return made


def needs_gradient(graph: Graph) -> set[int]:
    """Keys of the floating tensors that depend on a weight."""
    found: set[int] = set()
    for operation in graph.operations:
        trains = any(variable.trainable for variable in operation.variables)
        if trains or any(key in found for key in operation.inputs):
            pairs = zip(operation.outputs, operation.dtypes, strict=True)
            found |= {key for key, dtype in pairs if tf.as_dtype(dtype).is_floating}
    return found


def num_bytes(value: Any) -> int:
    """Bytes of a tensor or variable with a known shape; 0 for None."""
    if value is None:
        return 0
    return int(np.prod(value.shape, dtype=np.int64)) * tf.as_dtype(value.dtype).size


def _kind(operation: Operation, pairs: Sequence[tuple[Any, Any]], wanted: Sequence[bool]) -> str:
    """The same text for operations that cost the same."""
    if not isinstance(operation.target, keras.layers.Layer):
        return f"operation {operation.name}"
    try:
        config = {**operation.target.get_config(), "name": None}
    except NotImplementedError:
        return f"operation {operation.name}"
    trainable = [variable.trainable for variable in operation.variables]
    inputs = [(str(t.shape), t.dtype.name, m is None) for t, m in pairs if t is not None]
    parts = [type(operation.target), config, trainable, inputs, operation.shapes, list(wanted)]
    return json.dumps(parts, default=str, sort_keys=True)


def _kept(file: Path, key: str, measure_here: Callable[[], list[OperationCost]]) -> Any:
    """What the file holds under a key; measured and written where it holds nothing."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    if key not in kept:
        kept[key] = measure_here()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        new.write_text(json.dumps(kept, indent=1))
        new.replace(file)
    return kept[key]


def _digest(graph: Graph, sample: Sequence[Any], device: str, num_cores: int | None) -> str:
    operations = [
        (op.name, _kind(op, [], []), op.inputs, op.outputs, op.dtypes) for op in graph.operations
    ]
    shapes = [None if t is None else (list(t.shape), t.dtype.name) for t in sample]
    settings = [
        os.environ.get(f"TF_{name}") for name in ("NUM_INTRAOP_THREADS", "ENABLE_ONEDNN_OPTS")
    ]
    where = [device.rpartition(":")[0], num_cores, *settings, tf.__version__, keras.__version__]
    text = json.dumps([operations, shapes, where], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_row(row: Sequence[Any]) -> OperationCost:
    name, forward_ms, backward_ms, weight_bytes, state_bytes, output_bytes = row
    made = tuple(output_bytes)
    return OperationCost(name, forward_ms, backward_ms, weight_bytes, state_bytes, made)
