"""What TensorFlow ran: the partitioned graphs of a step, read from its run metadata.

TensorFlow splits the optimised graph of a function into one graph a device and runs these. They
are the only place where the device of every operation can be read: the traced graph holds
requests. They are exported when a function is instantiated, so `record` needs a function that has
not run before. Bodies of functions that were not inlined are missing; `Op.calls` names them.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Op", "Run", "Transfer", "device_name", "read", "record"]

# Of each output of an operation: elements, bytes of one, whether it is an integer or a boolean.
_Outputs = list[tuple[int | None, int, bool]]
_Sizes = dict[str, _Outputs]
_SENDS, _RECVS = ("_Send", "_HostSend"), ("_Recv", "_HostRecv")
_LOCAL = re.compile(r"^/job:localhost/replica:0/task:0")
_SHORT = re.compile(r"(?:^|/)(?:device:)?([A-Za-z_]+):(\d+)$")
_FUSED = re.compile(r"^_(?:Mkl(?:Native)?(?:Fused)?|Fused)|(?:WithBias)?(?:V\d+)?$")


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation that ran.

    Attributes:
        index: its position in `Run.ops`.
        name: its name in the graph that ran.
        type: its type as TensorFlow ran it, `_MklNativeFusedConv2D` for example.
        device: for example "/device:CPU:1".
        inputs: positions of the operations whose outputs it reads; a `_Recv` reads its `_Send`.
        controls: positions of the operations that it waits for without reading them.
        elements: number of elements of its largest output, None when unknown.
        num_bytes: bytes of all its outputs, None when unknown.
        integer: whether all its outputs are integers or booleans.
        variable: whether it is an argument that holds a variable.
        calls: names of functions that it calls, whose bodies were not read.
    """

    index: int
    name: str
    type: str
    device: str
    inputs: tuple[int, ...] = ()
    controls: tuple[int, ...] = ()
    elements: int | None = None
    num_bytes: int | None = None
    integer: bool = False
    variable: bool = False
    calls: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Its type without the names of fused and vendor's kernels: `Conv2D`, `MatMul`."""
        return _FUSED.sub("", self.type) or self.type


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A tensor that crossed from one device to another.

    Attributes:
        source: position of the operation that made it.
        targets: positions of the operations that read it.
        sender: the device that it leaves.
        receiver: the device that it reaches.
        num_bytes: its size, None when its shape is unknown.
    """

    source: int
    targets: tuple[int, ...]
    sender: str
    receiver: str
    num_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """All operations that a step ran, and the tensors that crossed devices."""

    ops: tuple[Op, ...]
    transfers: tuple[Transfer, ...]

    def devices(self) -> list[str]:
        """The devices that ran something, in order."""
        return sorted({op.device for op in self.ops})


def device_name(device: str) -> str:
    """A device's short canonical name.

    >>> device_name("/job:localhost/replica:0/task:0/device:CPU:1"), device_name("gpu:0")
    ('/device:CPU:1', '/device:GPU:0')
    """
    local = _LOCAL.sub("", device)
    return _SHORT.sub(lambda m: f"/device:{m[1].upper()}:{m[2]}", local)


def record(step: Callable[[], object]) -> Run:
    """Runs `step`, which must call a fresh `tf.function`, and reads the graphs that ran."""
    from tf_mp import compat

    with compat.run_metadata() as export:
        step()
        metadata = export()
    return read(metadata.function_graphs)


def read(function_graphs: Iterable[Any]) -> Run:
    """Reads `RunMetadata.function_graphs`."""
    ops: list[Op] = []
    transfers: list[Transfer] = []
    for graphs in function_graphs:
        _read_function(graphs, ops, transfers)
    return Run(tuple(ops), tuple(transfers))


def _read_function(graphs: Any, ops: list[Op], transfers: list[Transfer]) -> None:
    """Appends the operations of one function: the partitions, joined by their transfers."""
    sizes = _output_sizes(graphs.post_optimization_graph)
    first = len(ops)
    nodes = [node for partition in graphs.partition_graphs for node in partition.node]
    senders = {_key(n): first + i for i, n in enumerate(nodes) if n.op in _SENDS}
    _add_sizes_of_edges(nodes, sizes)
    for partition in graphs.partition_graphs:
        names = {node.name: len(ops) + i for i, node in enumerate(partition.node)}
        for node in partition.node:
            inputs = [names[_producer(t)] for t in node.input if not t.startswith("^")]
            controls = [names[_producer(t)] for t in node.input if t.startswith("^")]
            if node.op in _RECVS and _key(node) in senders:
                inputs.append(senders[_key(node)])
            ops.append(_op(len(ops), node, inputs, controls, sizes.get(node.name)))
    transfers.extend(_transfers(ops, first))


def _op(
    index: int, node: Any, inputs: list[int], controls: list[int], outputs: _Outputs | None
) -> Op:
    counts = [None] if outputs is None else [count for count, _, _ in outputs]
    known = [count for count in counts if count is not None]
    complete = outputs is not None and len(known) == len(counts)
    return Op(
        index,
        node.name,
        node.op,
        device_name(node.device),
        tuple(inputs),
        tuple(controls),
        elements=max(known, default=0) if complete else None,
        num_bytes=sum((n or 0) * width for n, width, _ in outputs or ()) if complete else None,
        integer=all(is_integer for _, _, is_integer in outputs or ()),
        variable=node.op == "_Arg" and "_handle_shapes" in node.attr,
        calls=tuple(_called(node)),
    )


def _transfers(ops: list[Op], first: int) -> list[Transfer]:
    """One transfer for each `_Recv` whose `_Send` was read."""
    readers: dict[int, list[int]] = {}
    for op in ops[first:]:
        for i in (*op.inputs, *op.controls):
            if ops[i].type in _RECVS:
                readers.setdefault(i, []).append(op.index)
    found = []
    for op in ops[first:]:
        if op.type in _RECVS and op.inputs:
            send = ops[op.inputs[0]]
            source, targets = send.inputs[0], tuple(readers.get(op.index, ()))
            found.append(Transfer(source, targets, send.device, op.device, op.num_bytes))
    return found


def _add_sizes_of_edges(nodes: list[Any], sizes: _Sizes) -> None:
    """Adds the sizes of what TensorFlow puts in where an edge crosses devices."""
    sent = {_key(node): node.input[0] for node in nodes if node.op in _SENDS}
    for node in nodes:
        if node.op == "Const" and node.name not in sizes:
            shape = node.attr["value"].tensor.tensor_shape
            sizes[node.name] = [(math.prod(dim.size for dim in shape.dim), 0, False)]
    for node in nodes:
        if node.op in _RECVS and _key(node) in sent:
            sizes[node.name] = _one_output(sent[_key(node)], sizes)
    for node in nodes:
        if node.op == "Identity" and node.name not in sizes and node.input:
            sizes[node.name] = _one_output(node.input[0], sizes)


def _one_output(tensor: str, sizes: _Sizes) -> _Outputs:
    """The size of one tensor, as the only output of what receives it."""
    name, _, output = tensor.partition(":")
    number = int(output or 0)
    return sizes[name][number : number + 1] if name in sizes else [(None, 0, False)]


def _producer(tensor: str) -> str:
    return tensor.lstrip("^").partition(":")[0]


def _key(node: Any) -> tuple[bytes, ...]:
    return tuple(node.attr[k].s for k in ("tensor_name", "send_device", "recv_device"))


def _called(node: Any) -> Iterable[str]:
    for value in node.attr.values():
        if value.WhichOneof("value") == "func":
            yield value.func.name
        elif value.WhichOneof("value") == "list":
            yield from (f.name for f in value.list.func)


def _output_sizes(graph: Any) -> _Sizes:
    """Sizes by TensorFlow's shape inference; empty where the graph cannot be imported."""
    import tensorflow as tf

    with tf.Graph().as_default() as imported:
        try:
            tf.graph_util.import_graph_def(graph, name="")
        except (ValueError, tf.errors.OpError):
            return {}
    return {op.name: [_size(output) for output in op.outputs] for op in imported.get_operations()}


def _size(tensor: Any) -> tuple[int | None, int, bool]:
    dtype = tensor.dtype
    return tensor.shape.num_elements(), dtype.size or 0, dtype.is_integer or dtype.is_bool
