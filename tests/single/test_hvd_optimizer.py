"""A wrapped optimizer in one process: its class, its file, XLA, and what is refused."""

import json
import subprocess
import sys
import warnings
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_mp import hvd


def network():
    keras.utils.clear_session()
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def trained(optimizer, **options):
    model = network()
    model.compile(optimizer, loss="mse", **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 3)), rng.normal(size=(16, 1))
    model.fit(x, y, batch_size=8, verbose=0)
    return model


def test_wrapping_keeps_the_object_its_class_name_and_its_state():
    optimizer = trained(keras.optimizers.Adam()).optimizer
    before = [v.numpy() for v in optimizer.variables]
    wrapped = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, backward_passes_per_step=3)
    assert wrapped is optimizer
    assert isinstance(wrapped, keras.optimizers.Adam)
    assert (type(wrapped).__name__, type(wrapped).__module__) == (
        keras.optimizers.Adam.__name__,
        keras.optimizers.Adam.__module__,
    )
    pairs = zip(before, wrapped.variables, strict=True)
    assert all(np.array_equal(a, b.numpy()) for a, b in pairs)
    assert wrapped.distribution.op == hvd.Sum
    assert wrapped.distribution.backward_passes_per_step == 3
    assert wrapped.distribution.process_set is hvd.global_process_set
    with pytest.raises(AttributeError):
        wrapped.distribution.op = hvd.Average


def test_a_world_of_one_trains_as_plain_keras_does():
    keras.utils.set_random_seed(1)
    wrapped = trained(hvd.DistributedOptimizer(keras.optimizers.Adam()))
    keras.utils.set_random_seed(1)
    plain = trained(keras.optimizers.Adam())
    for one, other in zip(wrapped.variables, plain.variables, strict=True):
        assert np.array_equal(one.numpy(), other.numpy())


@keras.saving.register_keras_serializable(package="mine")
class OwnSGD(keras.optimizers.SGD):
    """An optimizer of the user's own."""


@pytest.mark.parametrize("cls", [keras.optimizers.Adam, OwnSGD])
def test_a_wrapped_optimizer_is_saved_word_for_word_like_a_plain_one(cls, tmp_path):
    configs = []
    for name, wrap in (("plain", lambda o: o), ("wrapped", hvd.DistributedOptimizer)):
        keras.utils.clear_session()
        model = trained(wrap(cls()))
        model.save(tmp_path / f"{name}.keras")
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as file:
            configs.append(json.loads(file.read("config.json"))["compile_config"]["optimizer"])
    assert configs[0]["config"].pop("name") == configs[1]["config"].pop("name")
    for config in configs:
        config.pop("shared_object_id", None)
    assert configs[0] == configs[1]
    assert configs[0]["class_name"] == cls.__name__


LOAD_ELSEWHERE = """
import sys
sys.modules["horovod"] = sys.modules["tf_mp"] = None  # importing either fails
import keras
model = keras.models.load_model(sys.argv[1])
kinds = [type(layer).__name__ for layer in model.layers]
print(type(model.optimizer).__name__, int(model.optimizer.iterations), *kinds)
"""


def test_a_saved_model_loads_where_neither_horovod_nor_tf_mp_is(tmp_path):
    model = keras.Sequential(
        [keras.Input((3,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    command = [sys.executable, "-c", LOAD_ELSEWHERE, str(tmp_path / "model.keras")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["Adam", "1", "BatchNormalization", "Dense"], found.stderr


def test_load_model_goes_on_distributed_with_the_state_of_a_plain_file(tmp_path):
    trained(keras.optimizers.Adam()).save(tmp_path / "plain.keras")
    model = hvd.load_model(tmp_path / "plain.keras", compression=hvd.Compression.fp16)
    assert hvd.is_distributed(model.optimizer)
    assert model.optimizer.distribution.compression is hvd.Compression.fp16
    assert int(model.optimizer.iterations) == 2
    with pytest.raises(ValueError, match="legacy"):
        hvd.load_model(tmp_path / "plain.keras", legacy_opts=True)


def test_load_model_gives_back_the_synchronised_layers_of_a_saved_model(tmp_path):
    model = keras.Sequential(
        [keras.Input((3,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    model.save(tmp_path / "model.keras")
    assert type(hvd.load_model(tmp_path / "model.keras").layers[0]) is hvd.SyncBatchNormalization


def test_auto_never_means_xla_for_a_wrapped_optimizer_even_where_a_gpu_is_listed(monkeypatch):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    real = tf.config.list_physical_devices
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [*real(kind), gpu])
    plain, wrapped = network(), network()
    plain.compile(keras.optimizers.SGD(), loss="mse")
    assert plain.jit_compile is True  # what Keras does by itself with a GPU
    wrapped.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
    assert wrapped.jit_compile is False
    hvd.DistributedOptimizer(plain.optimizer)
    assert plain.jit_compile is False  # wrapped after compile


@pytest.mark.parametrize("scaled", [False, True])
def test_xla_asked_for_by_name_is_refused_in_one_sentence(scaled):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD())
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    with pytest.raises(ValueError, match="jit_compile=True.*XLA cannot compile Horovod"):
        network().compile(optimizer, loss="mse", jit_compile=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": hvd.Max}, "hvd.Average"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "with op=Average"),
        ({"backward_passes_per_step": 0}, "1 or more"),
        ({"groups": -1}, "list of lists"),
        ({"groups": "all"}, "list of lists"),
        ({"op": hvd.Adasum, "average_aggregated_gradients": True}, "one of them"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **arguments)


def test_what_is_no_keras_optimizer_or_wrapped_already_is_refused():
    with pytest.raises(TypeError, match="keras.optimizers"):
        hvd.DistributedOptimizer("adam")
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD())
    for again in (wrapped, keras.optimizers.LossScaleOptimizer(wrapped)):
        with pytest.raises(ValueError, match="wrapped by DistributedOptimizer already"):
            hvd.DistributedOptimizer(again)
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(tape)


def test_the_old_name_of_groups_warns_and_still_works():
    with pytest.warns(DeprecationWarning, match="use groups"):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), num_groups=2)
    assert optimizer.distribution.groups == 2


def test_a_layer_that_is_not_built_cannot_be_local():
    with pytest.raises(ValueError, match="build the model first"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=keras.layers.Dense(1))


def test_broadcasting_global_variables_names_the_two_ways_that_work():
    with pytest.raises(RuntimeError, match="broadcast_variables.*BroadcastGlobalVariables"):
        hvd.broadcast_global_variables(0)


def test_the_wrapped_optimizer_is_found_within_a_loss_scale_optimizer():
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD())
    scaled = keras.optimizers.LossScaleOptimizer(wrapped)
    assert hvd.distributed_in(scaled) is hvd.distributed_in(wrapped) is wrapped
    assert hvd.distributed_in(keras.optimizers.SGD()) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hvd.distributed_in(None) is None
