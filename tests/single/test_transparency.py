"""Promise 1: the result does not depend on how the work was spread."""

import keras
import numpy as np
import pytest
import reference
import zoo

import tf_mp

# model, stages, micro-batches, schedule, recompute: every value of each, most pairs.
# tests/transparency_grid.py has all, with ResNet-50 and VGG-16.
SAMPLE = [
    ("mnist_cnn", 1, 1, "1f1b", False),
    ("mnist_cnn", 2, 4, "1f1b", False),
    ("mnist_cnn", 4, 3, "gpipe", True),
    ("residual", 3, 2, "1f1b", False),
    ("residual", 2, 3, "gpipe", True),
    ("transformer", 4, 8, "1f1b", False),
    ("transformer", 2, 3, "gpipe", True),
    ("lstm", 2, 4, "1f1b", False),
    ("lstm", 3, 2, "gpipe", True),
    ("unet", 4, 2, "1f1b", True),
    ("unet", 3, 8, "gpipe", False),
    ("two_in_two_out", 3, 4, "1f1b", False),
    ("two_in_two_out", 2, 3, "gpipe", True),
]


def even(model, stages):
    """A balance by number of operations."""
    from tf_mp.graph import trace

    count = len(trace(model).operations)
    edges = [round(count * k / stages) for k in range(stages + 1)]
    return [b - a for a, b in zip(edges, edges[1:])]


def split(
    case, stages, micro_batches, schedule="1f1b", recompute=False, cuts=None, **compiled
):  # fmt: skip
    plain = case.build()
    model = keras.models.clone_model(plain)
    cuts = cuts or (even(plain, stages) if stages > 1 else "auto")
    model = tf_mp.parallelize(
        model, cuts=cuts, stages=stages,
        micro_batches=micro_batches, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    reference.copy_weights(plain, model)
    weights = case.loss_weights
    if weights:
        compiled["loss_weights"] = dict(zip(plain.output, weights))
    model.compile(
        compiled.pop("optimizer", reference.Keep()), loss=case.compiled_loss(plain), **compiled
    )
    return plain, model


@pytest.fixture(autouse=True)
def usual_float():
    yield
    keras.config.set_floatx("float32")


@pytest.mark.filterwarnings("ignore:.*every device idles")
@pytest.mark.parametrize(("name", "stages", "micro_batches", "schedule", "recompute"), SAMPLE)
def test_every_gradient_equals_the_plain_models(name, stages, micro_batches, schedule, recompute):
    if name == "residual":
        # Batch normalisation of a few samples magnifies rounding a million times: in double.
        keras.config.set_floatx("float64")
    case = zoo.case(name, batch=10)
    plain, model = split(case, stages, micro_batches, schedule, recompute)
    logs = model.train_on_batch(case.x, case.y, return_dict=True)
    expected, state, loss = reference.step(
        plain, case.losses, case.x, case.y, micro_batches, loss_weights=case.loss_weights
    )
    found = reference.gradients_of(model)
    compare(found, expected, dict(zip(paths(plain), paths(model))))
    assert logs["loss"] == pytest.approx(loss, rel=1e-5)
    after = {v.path: v.numpy() for v in model.non_trainable_variables}
    same = dict(zip((v.path for v in plain.variables), (v.path for v in model.variables)))
    for path, value in state.items():
        np.testing.assert_allclose(after[same[path]], value, rtol=1e-5, atol=1e-6, err_msg=path)


def paths(model):
    return [v.path for v in model.trainable_variables]


def compare(found, expected, names):
    assert len(found) == len(expected) > 0
    for path, gradient in expected.items():
        np.testing.assert_allclose(
            found[names[path]], gradient, rtol=1e-5, atol=1e-6, err_msg=path
        )


def test_gradients_are_equal_to_the_bit_where_only_stages_or_schedule_change():
    case = zoo.case("unet")
    first = None
    for stages, schedule in ((1, "gpipe"), (2, "1f1b"), (3, "gpipe")):
        plain, model = split(case, stages, 3, schedule)
        if first is None:
            start = [v.numpy() for v in model.variables]
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        model.train_on_batch(case.x, case.y)
        found = list(reference.gradients_of(model).values())
        first = first or found
        for a, b in zip(first, found, strict=True):
            np.testing.assert_array_equal(a, b)
