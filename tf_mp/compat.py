"""Every private name of TensorFlow and Keras that tf_mp needs, in one place.

Private names can move with any release. Each one here has a canary in `tests/single/
test_compat.py` that says, by name, which of them is gone; nothing else imports private names.
Checked with TensorFlow 2.21 and Keras 3.15.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export as _api_export
from keras.src.backend.common import masking as _masking
from keras.src.losses import loss as _loss
from keras.src.models.functional import Functional
from keras.src.ops.node import Node
from keras.src.saving import object_registration as _registration
from keras.src.trainers.data_adapters import data_adapter_utils as _adapter
from keras.src.trainers.trainer import Trainer
from tensorflow.python.eager import context as _context

__all__ = [
    "Functional",
    "Trainer",
    "as_function",
    "body_of",
    "device_in_force",
    "get_mask",
    "graph_nodes",
    "initialise_on",
    "loss_weights_of_mask",
    "on_node",
    "one_replica",
    "raw",
    "replace_input",
    "rewritten_once",
    "run_metadata",
    "seed_generators",
    "serialise_as",
    "set_mask",
    "step_counter",
    "trainable_variables_of",
    "unpack",
    "wait_for",
]

get_mask = _masking.get_keras_mask
set_mask = _masking.set_keras_mask
unpack = _adapter.unpack_x_y_sample_weight


def body_of(operation: tf.Operation) -> Any:
    """The graph of the function that an operation calls; None if it calls none."""
    if operation.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    return operation.graph._get_function(operation.get_attr("f").name).graph


def replace_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Lets an operation of a graph read another tensor, of the same dtype and shape."""
    operation._update_input(index, tensor)


def wait_for(operation: tf.Operation, tensor: tf.Tensor) -> None:
    """Lets an operation of a graph wait for a tensor that was made before it."""
    operation._add_control_input(tensor.op)


def device_in_force() -> str:
    """The device of the enclosing `tf.device` block; an empty string outside of any."""
    return _context.context().device_name or ""


def as_function(model: keras.Model) -> Functional | None:
    """The functional graph behind a Sequential or functional model, None for another kind."""
    if isinstance(model, keras.Sequential):
        plain = type(model).call is keras.Sequential.call or _is_run_time_class(model)
        return model._functional if plain else None
    if isinstance(model, Functional) and _calls_its_graph(model):
        return model
    return None


def _is_run_time_class(model: keras.Model) -> bool:
    return type(model).call is model.__class__.call


def _calls_its_graph(model: Functional) -> bool:
    return type(model).call is Functional.call


def graph_nodes(function: Functional) -> list[Any]:
    """The calls of a functional graph in the order in which Keras runs them."""
    depths = function._nodes_by_depth
    nodes = [node for depth in sorted(depths, reverse=True) for node in depths[depth]]
    return [node for node in nodes if node.operation and not node.is_input]


def seed_generators(layer: Any) -> list[keras.random.SeedGenerator]:
    """The `SeedGenerator` objects of a layer and of the layers within it, in a fixed order."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    found: list[keras.random.SeedGenerator] = []
    for inner in layer._flatten_layers():
        found.extend(g for g in inner._seed_generators if g not in found)
    return found


def raw(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable that holds the value of a Keras variable."""
    return variable._value


def initialise_on(variable: keras.Variable, device: str) -> None:
    """Moves a built Keras variable to a device, with its value."""
    value = variable._value.numpy()
    with tf.device(device):
        variable._value = None
        variable._initialize(value)


def loss_weights_of_mask(sample_weight: Any, mask: Any, reduction: str | None) -> tf.Tensor:
    """The weights by which a Keras loss multiplies its values, `float32`.

    One of `sample_weight` and `mask` must be given; either is (micro_batch, ...).
    """
    weight = None if sample_weight is None else tf.cast(sample_weight, tf.float32)
    return _loss.apply_mask(weight, mask, dtype="float32", reduction=reduction)


@contextlib.contextmanager
def on_node(callback: Callable[[Any], None]) -> Iterator[None]:
    """Calls `callback(node)` for each symbolic call of a Keras operation in this block."""
    original = Node.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        callback(self)

    Node.__init__ = init
    try:
        yield
    finally:
        Node.__init__ = original


# --- placement: the graphs that ran -----------------------------------------------------------


@contextlib.contextmanager
def run_metadata() -> Iterator[Callable[[], Any]]:
    """Collects the graphs that functions run; yields what exports them as `RunMetadata`.

    TensorFlow 2 has no public way to the graphs that ran. Only functions that are instantiated
    inside the block are exported.
    """
    _context.enable_run_metadata()
    try:
        _context.export_run_metadata()  # drops what an earlier block left
        yield _context.export_run_metadata
    finally:
        _context.disable_run_metadata()


# --- Horovod on Keras 3 (tf_mp/hvd); canaries in tests/single/test_hvd_compat.py ---


def serialise_as(cls: type, base: type) -> None:
    """Makes a class made at run time be saved under the name of the class it stands for."""
    exported = _api_export.get_name_from_symbol(base)
    if exported is not None:
        _api_export.REGISTERED_OBJS_TO_NAMES[cls] = exported
    if base in _registration.GLOBAL_CUSTOM_NAMES:
        _registration.GLOBAL_CUSTOM_NAMES[cls] = _registration.GLOBAL_CUSTOM_NAMES[base]


def trainable_variables_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The variables that a built optimizer updates when `apply` is not told which."""
    return optimizer._trainable_variables


def layers_within(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and every layer within it, at any depth."""
    return list(model._flatten_layers())


def floating_state(model: keras.Model) -> list[keras.Variable]:
    """What layers keep besides weights, as floating numbers; frozen weights do not count."""
    layers = layers_within(model)
    kept = [variable for layer in layers for variable in layer._non_trainable_variables]
    return [variable for variable in kept if tf.as_dtype(variable.dtype).is_floating]


def is_built(model: keras.Model) -> bool:
    """Whether the model and all layers within it have their variables."""
    return bool(model.variables) and all(layer.built for layer in layers_within(model))


def build_from(model: keras.Model, iterator: Any) -> bool:
    """Builds a model, its metrics and its optimizer from the shapes of an iterator's batches.

    Returns:
        Whether that was possible; some models are only built by running them.
    """
    specs = tf.nest.map_structure(
        lambda spec: spec if isinstance(spec, tf.TensorSpec) else None,
        getattr(iterator, "element_spec", None),
    )
    if specs is None:
        return False
    try:
        model._symbolic_build(data_batch=specs)
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def build_outside(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    """Builds an optimizer outside of the function that is being traced.

    `ScheduleFreeAdamW` copies the weights while it is built: traced, that would repeat each step.
    Weights made in this very trace have no values yet; there it is built as Keras does.
    """
    with tf.init_scope():
        ready = [tf.raw_ops.VarIsInitializedOp(resource=v.handle) for v in variables]
        if tf.reduce_all(ready):
            optimizer.build(variables)
    if not optimizer.built:
        optimizer.build(variables)


auto_jit_compile = Trainer._resolve_auto_jit_compile


def replace_auto_jit_compile(function: Callable[[Any], bool]) -> None:
    """Sets how `compile` decides about XLA where `jit_compile="auto"`."""
    Trainer._resolve_auto_jit_compile = function


@contextlib.contextmanager
def one_replica(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """An optimizer's step without its sum over replicas, of which there is one.

    TensorFlow registers a gradient for that sum, even of one replica, which keeps the graph of the
    step, and with it all variables and gradients that it reads, until the process ends.
    """
    object.__setattr__(optimizer, "_all_reduce_sum_gradients", lambda pairs: pairs)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "_all_reduce_sum_gradients")


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable that counts calls of `apply`; `iterations` may be a quotient of it."""
    return optimizer._iterations


def bind_compile(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `keras.Model.compile` by name."""
    return inspect.signature(keras.Model.compile).bind(None, *args, **kwargs).arguments


def without_jit(args: tuple[Any, ...]) -> dict[str, Any]:
    """`jit_compile=False`, unless it was given by position."""
    names = list(inspect.signature(keras.Model.compile).parameters)
    return {} if len(args) >= names.index("jit_compile") else {"jit_compile": False}


# --- the graph of a step: TensorFlow's rewriting of it ----------------------------------------


@contextlib.contextmanager
def rewritten_once() -> Iterator[None]:
    """Functions that are called for the first time inside it are rewritten in one round.

    TensorFlow rewrites a graph before its first run (Grappler), in two rounds. The graph of many
    micro-batches has tens of thousands of nodes, and rewriting them was two thirds of the time to
    the first step (benchmarks/start). The second round finds next to nothing; the layout pass is
    for GPUs; the memory pass knows a CPU as a device of 256 MB, whatever the machine has.
    What a person has set with `tf.config.optimizer` stays. There is no public way to the first
    and the last of these settings, nor to any of them for some functions only.
    """
    context = _context.context()
    kept = context.function_call_options
    context.function_call_options = _one_round(kept.config_proto_serialized, kept.executor_type)
    try:
        yield
    finally:
        context.function_call_options = kept


@functools.cache
def _one_round(config: bytes, executor: str | None) -> Any:
    """The options of a call, with the rewriting of `rewritten_once` where none is set."""
    wanted = tf.compat.v1.ConfigProto.FromString(config)
    settings = wanted.graph_options.rewrite_options
    kind = type(settings)
    for name, value in (
        ("meta_optimizer_iterations", kind.ONE),
        ("memory_optimization", kind.NO_MEM_OPT),
        ("layout_optimizer", kind.OFF),
    ):
        if not getattr(settings, name):
            setattr(settings, name, value)
    return _context.FunctionCallOptions(executor, wanted)
