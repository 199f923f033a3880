"""Every public name of horovod.tensorflow.keras is in tf_mp.hvd, with the same parameters."""

import inspect
import types
import warnings

import pytest

from tf_mp import hvd

with warnings.catch_warnings(record=True) as _CAUGHT:
    warnings.simplefilter("always")
    import horovod.keras as horovod_for_keras
    import horovod.tensorflow as horovod
    import horovod.tensorflow.keras as theirs

# Names that are not in tf_mp.hvd, and why.
LEFT_OUT = {
    "is_version_greater_equal_than": "a helper that Horovod imported, no part of its interface",
}
# Parameters that differ, and why.
DIFFERENT = {
    "BestModelCheckpoint": "`filepath` may be given at once; Horovod has it set afterwards",
    "DistributedGradientTape.gradient": "`unconnected_gradients`, which TensorFlow's tape takes",
}
EXTRA_PARAMETERS = {"BestModelCheckpoint": ["filepath"]}


def public(module):
    """Names and values that a module offers, without the modules that it imported."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    values = {name: getattr(module, name) for name in names}
    return {n: v for n, v in values.items() if not isinstance(v, types.ModuleType)}


def members(module, ours):
    return [(name, value, getattr(ours, name, None)) for name, value in public(module).items()]


NAMES = [
    *members(theirs, hvd),
    *members(theirs.callbacks, hvd.callbacks),
    *members(theirs.elastic, hvd.elastic),
    *[(n, getattr(horovod, n), getattr(hvd, n)) for n in (
        "DistributedGradientTape", "PartialDistributedGradientTape", "SyncBatchNormalization",
        "broadcast_variables", "grouped_allreduce", "join", "allgather_object",
    )],
    (
        "PartialDistributedOptimizer",
        horovod_for_keras.PartialDistributedOptimizer,
        hvd.PartialDistributedOptimizer,
    ),
]


def parameters(function):
    """Names and defaults in their order; of a class, those of its constructor."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize(("name", "value", "own"), NAMES, ids=[name for name, *_ in NAMES])
def test_the_name_is_there_with_the_same_parameters(name, value, own):
    if name in LEFT_OUT:
        return
    assert own is not None, f"{name} is missing"
    if callable(value) and own is not value and name != "init":
        wanted = parameters(value)
        extra = EXTRA_PARAMETERS.get(name, [])
        found = [pair for pair in parameters(own) if pair[0] not in extra]
        assert found == wanted


def test_enough_names_were_walked_for_the_walk_to_mean_something():
    assert len(NAMES) > 50
    assert {"KerasState", "LearningRateWarmupCallback", "rank"} <= {name for name, *_ in NAMES}


def test_the_adasum_operation_that_only_horovods_tensorflow_has_is_there_too():
    assert hvd.Adasum == horovod.Adasum


def test_horovods_own_keras_module_beside_ours_warns_once_and_names_the_import():
    (warning,) = [w for w in _CAUGHT if "made for Keras 2" in str(w.message)]
    assert "import tf_mp.hvd as hvd" in str(warning.message)


def test_a_name_that_nobody_has_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nor has horovod.tensorflow"):
        hvd.no_such_name  # noqa: B018
