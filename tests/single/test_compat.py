"""Canaries: each private name that we need, named when it is gone."""

import types

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tf_mp import compat, recording, split_model, xplane


def dense_model():
    image = keras.Input((3,))
    x = keras.layers.Dense(4, name="a")(image)
    return keras.Model(image, keras.layers.Dropout(0.5, name="b")(x))


def test_masks_travel_on_tensors():
    tensor = tf.ones([2])
    compat.set_mask(tensor, tf.constant([True, False]))
    assert compat.get_mask(tensor) is not None
    assert compat.get_mask(tf.identity(tensor)) is None


def test_data_of_a_step_unpacks_in_three():
    assert compat.unpack((1, 2)) == (1, 2, None)


def test_the_device_in_force_is_seen_even_where_it_is_absent():
    assert compat.device_in_force() == ""
    with tf.device("/GPU:7"):
        assert compat.device_in_force().endswith("GPU:7")


def test_the_graph_behind_each_kind_of_model_is_found():
    functional = dense_model()
    assert compat.as_function(functional) is functional
    sequential = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    assert len(compat.graph_nodes(compat.as_function(sequential))) == 1
    assert compat.as_function(keras.Sequential([keras.layers.Dense(2)])) is None
    assert [n.operation.name for n in compat.graph_nodes(functional)] == ["a", "b"]


def test_seed_generators_of_inner_layers_are_found():
    attention = keras.layers.MultiHeadAttention(1, 2, dropout=0.1)
    attention(tf.ones([1, 2, 2]), tf.ones([1, 2, 2]))
    assert len(compat.seed_generators(attention)) == 1
    assert compat.seed_generators(keras.ops.add) == []


def test_a_variable_moves_with_its_value():
    variable = keras.Variable([1.0, 2.0])
    compat.initialise_on(variable, "/device:CPU:3")
    assert compat.raw(variable).device.endswith("CPU:3")
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_calls_are_reported_as_they_are_recorded():
    nodes = []
    with compat.on_node(nodes.append):
        dense_model()
    assert [n.operation.name for n in nodes][-2:] == ["a", "b"]
    dense_model()
    assert len(nodes) == 3


def test_loss_weights_of_a_mask_multiply_the_sample_weights():
    found = compat.loss_weights_of_mask([1.0, 3.0], tf.constant([True, False]), "sum")
    assert found.numpy().tolist() == [1.0, 0.0]


def test_arguments_of_compile_are_found_by_name():
    assert compat.bind_compile("sgd", loss="mse")["optimizer"] == "sgd"
    assert compat.without_jit(("sgd",)) == {"jit_compile": False}


def test_a_subclassed_model_is_recorded_by_calling_it():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = keras.layers.Dense(2)

        def call(self, x, training=False):
            return keras.ops.relu(self.a(x)) if training and self.branch else self.a(x)

    model = Own()
    model.branch = False
    assert len(compat.graph_nodes(recording.subclassed(model, keras.Input((3,))))) == 1
    model.branch = True
    with pytest.raises(ValueError, match="differ between training"):
        recording.subclassed(model, keras.Input((3,)))


def test_the_graphs_that_ran_are_exported():
    with compat.run_metadata() as export:
        tf.function(lambda x: tf.linalg.matmul(x, x))(tf.ones([3, 3]))
        found = export().function_graphs
    nodes = [n for g in found for p in g.partition_graphs for n in p.node]
    assert any("MatMul" in node.op and node.device.endswith("CPU:0") for node in nodes)
    assert any(graph.post_optimization_graph.node for graph in found)


def test_the_profilers_files_can_be_read(tmp_path):
    function = tf.function(lambda x: tf.linalg.matmul(x, x, name="product"))
    function(tf.ones([3, 3]))
    with tf.profiler.experimental.Profile(str(tmp_path)):
        with tf.profiler.experimental.Trace("a_step", step_num=0):
            function(tf.ones([3, 3]))
    [file] = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    events = {event.name: event for event in xplane.profiler_events(str(file))}
    [product] = [e for name, e in events.items() if name.startswith("product:")]
    step = events["a_step"]
    assert step.start_ns <= product.start_ns < product.end_ns <= step.end_ns


def rewriting_in_force():
    """What the next function that is called for the first time is rewritten with."""
    serialised = context.context().function_call_options.config_proto_serialized
    return tf.compat.v1.ConfigProto.FromString(serialised).graph_options.rewrite_options


def test_a_step_is_rewritten_once_and_other_functions_as_before():
    before = rewriting_in_force()
    with compat.rewritten_once():
        inside = rewriting_in_force()
        assert inside.meta_optimizer_iterations == inside.ONE
        assert inside.memory_optimization == inside.NO_MEM_OPT
        assert inside.layout_optimizer == inside.OFF
        assert float(tf.function(lambda x: x + 1)(1.0)) == 2
    assert rewriting_in_force() == before


def test_what_a_person_set_for_the_rewriting_stays():
    tf.config.optimizer.set_experimental_options({"layout_optimizer": True, "remapping": False})
    try:
        with compat.rewritten_once():
            inside = rewriting_in_force()
    finally:
        context.context()._optimizer_experimental_options = {}
        context.context().function_call_options = None
    assert inside.layout_optimizer == inside.ON and inside.remapping == inside.OFF
    assert inside.meta_optimizer_iterations == inside.ONE
    assert rewriting_in_force().remapping != inside.OFF


@pytest.mark.parametrize(
    ("device", "iterations"), [("/device:CPU:1", "ONE"), ("/device:GPU:1", "DEFAULT_NUM_ITERS")]
)
def test_steps_on_cpus_are_rewritten_once_and_those_with_a_gpu_as_tensorflow_does(
    device, iterations
):
    stages = [types.SimpleNamespace(device=d) for d in ("/device:CPU:0", device)]
    plan = types.SimpleNamespace(stages=stages)
    model = types.SimpleNamespace(_tf_mp_pipeline=plan, run_eagerly=False)
    step = split_model._PerBatchSize(model, lambda data: data)
    step._traced[1] = lambda data: rewriting_in_force().meta_optimizer_iterations
    assert step(tf.ones([1])) == getattr(rewriting_in_force(), iterations)
