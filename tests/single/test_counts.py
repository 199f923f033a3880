"""What a step costs, in counts that no clock disturbs: traces, nodes of the graph, transfers."""

import gc
import weakref

import keras
import pytest
import reference  # noqa: F401 - a fresh Keras session for each test
import tensorflow as tf
import test_transparency
import zoo

import tf_mp


def split(name, micro_batches, stages=2, batch=16):
    case = zoo.case(name, batch=batch)
    _, model = test_transparency.split(
        case, stages, micro_batches, optimizer=keras.optimizers.RMSprop()
    )
    return case, model


def traced_nodes(model, case):
    """Nodes of the step's graph and of the functions in its library."""
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    arguments = [tf.constant(part) for part in (case.x, case.y)]
    graph = step.get_concrete_function(*arguments).graph.as_graph_def()
    return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)


def test_each_stage_is_traced_once_a_batch_shape_whatever_the_steps_and_epochs():
    case, model = split("mnist_cnn", 4, batch=40)
    # per epoch two batches of 16 and one of 8: micro-batches of 4 and of 2
    model.fit(case.x, case.y, batch_size=16, epochs=3, verbose=0)
    counts = {
        (stage.index, name): function.experimental_get_tracing_count()
        for stage in tf_mp.pipeline_of(model).stages
        for name, function in stage._functions.items()
    }
    assert {stage for stage, _ in counts} == {0, 1}
    forwards = {key: n for key, n in counts.items() if key[1] == "forward_True"}
    assert forwards == {(0, "forward_True"): 2, (1, "forward_True"): 2}
    assert max(counts.values()) <= 4  # a sum begins without a sum: one more trace a shape
    model.fit(case.x, case.y, batch_size=16, epochs=2, verbose=0)
    for stage in tf_mp.pipeline_of(model).stages:
        for name, function in stage._functions.items():
            assert function.experimental_get_tracing_count() == counts[stage.index, name], name


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_more_micro_batches_add_calls_and_not_copies_of_the_stages(name):
    case, two = split(name, 2)
    _, eight = split(name, 8)
    few, many = traced_nodes(two, case), traced_nodes(eight, case)
    assert many < 1.5 * few, (few, many)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_only_boundary_tensors_and_scalars_cross(micro_batches):
    case, model = split("mnist_cnn", micro_batches)
    proof = tf_mp.verify_placement(model, (case.x, case.y))
    large = [t for t in proof.run.transfers if t.num_bytes is None or t.num_bytes > 8]
    there = [t for t in large if t.sender.endswith("CPU:0") and t.receiver.endswith("CPU:1")]
    back = [t for t in large if t.sender.endswith("CPU:1") and t.receiver.endswith("CPU:0")]
    assert len(back) == micro_batches  # gradients
    # activations; the labels of each micro-batch go to the last stage too
    assert micro_batches <= len(there) <= 2 * micro_batches
    assert len(large) == len(there) + len(back)


def test_a_model_that_is_gone_has_given_its_weights_and_its_steps_back():
    def steps():
        gc.collect()
        graphs = [each for each in gc.get_objects() if isinstance(each, tf.Graph)]
        return sum("step" in getattr(graph, "name", "") for graph in graphs)

    before = steps()
    case, model = split("mnist_cnn", 2)
    model.fit(case.x, case.y, batch_size=16, verbose=0)
    weight = weakref.ref(model.trainable_variables[0])
    assert steps() == before + 1 and weight() is not None
    del model
    assert steps() == before and weight() is None
