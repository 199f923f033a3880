"""Of a gradient only what needs no upstream gradient is made to wait."""

import pytest
import tensorflow as tf

from tf_mp import early


def gated(function, shape=(2, 4, 4, 1)):
    """Names of the tensors of the forward that the gradient of a function reads gated."""

    @tf.function(autograph=False)
    def step(x, upstream):
        token = tf.identity(tf.zeros([]), name="token")
        call = tf.function(function, autograph=False)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        with early.waits(token, [upstream]):
            return tape.gradient(y, x, output_gradients=upstream)

    x = tf.ones(shape)
    graph = step.get_concrete_function(x, tf.ones_like(function(x))).graph
    return [
        op.inputs[0].op.type
        for op in graph.get_operations()
        if op.type == "Identity"
        and any(c.name == "token" for c in op.control_inputs)
        and op.outputs[0].consumers()
    ]


def pooled(x):
    return tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")


@pytest.mark.parametrize("function", [pooled, tf.nn.relu, tf.tanh, lambda x: x * x])
def test_what_waits_through_its_upstream_gradient_is_left_alone(function):
    assert gated(function) == []


def test_the_slope_of_a_gelu_waits_for_its_turn():
    found = gated(tf.nn.gelu)
    assert found and set(found) <= {"PartitionedCall", "StatefulPartitionedCall", "Placeholder"}


def test_operations_outside_of_a_function_wait_too():
    @tf.function(autograph=False)
    def step(x, upstream):
        token = tf.identity(tf.zeros([]), name="token")
        y = tf.exp(x)
        with early.waits(token, [upstream]):
            slope = tf.sin(y, name="slope")
            return upstream * slope + tf.cos(upstream, name="late")

    operations = step.get_concrete_function(tf.ones([2]), tf.ones([2])).graph.get_operations()
    by_name = {op.name: op for op in operations}
    gate = by_name["slope"].inputs[0].op
    assert gate.type == "Identity" and [c.name for c in gate.control_inputs] == ["token"]
    assert by_name["late"].inputs[0].op.type == "Placeholder"


def test_eagerly_nothing_is_done():
    with early.waits(tf.zeros([]), []):
        assert float(tf.sin(tf.zeros([]))) == 0
