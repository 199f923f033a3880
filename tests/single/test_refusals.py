"""What cannot be is refused before the first tensor: what came, what was expected, what to do."""

import keras
import pytest
import tensorflow as tf

import tf_mp
import tf_mp.hvd as hvd


def build():
    image = keras.Input((6,), name="image")
    x = keras.layers.Dense(8, name="a")(image)
    x = keras.layers.Dense(8, name="b")(x)
    return keras.Model(image, keras.layers.Dense(3, name="c")(x), name="small")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cuts": ["bb"]}, "No operation of this name.*'bb'.*such as 'b'"),
        ({"cuts": ["a"]}, "A stage would be empty"),
        ({"cuts": ["c", "b"]}, r"The cuts go back.*\['b', 'c'\]"),
        ({"cuts": [2, 2]}, r"adds up to 4, and the model has 3.*cuts=\["),
        ({"cuts": [3, 0]}, "stage 1 would be empty"),
        ({"cuts": "somewhere"}, "Expected: 'scopes', 'auto'"),
        ({"cuts": ["b"], "stages": 3}, "which makes 2 stages"),
        ({"cuts": "auto", "stages": 4, "max_bytes": 8}, "at least|1 to 3 stages"),
        ({"cuts": ["b"], "devices": ["/gpu:5", "/gpu:6"]}, "local to a rank"),
        ({"cuts": ["b"], "devices": [0, 9]}, "device 9.*local to a rank"),
        ({"cuts": ["b"], "devices": [0]}, "one device for each stage"),
        ({"cuts": ["b"], "micro_batches": 0}, "micro_batches=0"),
        ({"cuts": ["b"], "schedule": "1f2b"}, "Did you mean '1f1b'"),
        ({"cuts": ["b"], "recompute": [True]}, "recompute=.*for 2 stages"),
        ({"cuts": lambda operation: 1}, "without a gap"),
        ({"cuts": lambda operation: 1 - (operation.name == "c")}, "The cut goes back"),
        ({"cuts": "scopes"}, "the function that builds the model"),
    ],
)
def test_a_cut_that_cannot_be_says_what_could(arguments, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        tf_mp.parallelize(build(), **arguments)


def test_synchronised_batch_normalisation_is_refused_by_name():
    image = keras.Input((6,))
    x = hvd.SyncBatchNormalization(name="norm")(image)
    with pytest.raises(ValueError, match="'norm' cannot be split.*SyncBatchNormalization"):
        tf_mp.parallelize(keras.Model(image, keras.layers.Dense(2, name="a")(x)), cuts=["a"])


def test_more_stages_than_devices_or_operations():
    with pytest.raises(ValueError, match="Received: 5 stages. Expected: at most 4"):
        image = keras.Input((6,))
        x = image
        for _ in range(6):
            x = keras.layers.Dense(2)(x)
        tf_mp.parallelize(keras.Model(image, x), cuts=[1, 1, 1, 1, 2])


def test_a_scope_that_this_rank_has_not_lists_those_it_has():
    def with_scopes():
        image = keras.Input((6,))
        with tf.device("/gpu:0"):
            x = keras.layers.Dense(2, name="a")(image)
        with tf.device("/gpu:5"):
            x = keras.layers.Dense(2, name="b")(x)
        return keras.Model(image, x)

    with pytest.raises(ValueError, match="(?s)GPU:5.*CPU:0, /device:CPU:1.*local to a rank"):
        tf_mp.parallelize(with_scopes)


def test_scopes_on_absent_devices_still_make_stages():
    model = tf_mp.parallelize(tf_mp.build_model)
    assert [s.device for s in tf_mp.pipeline_of(model).stages] == [
        "/device:CPU:0",
        "/device:CPU:1",
    ]


def test_a_function_that_returns_no_model_is_refused():
    with pytest.raises(ValueError, match="returned int"):
        tf_mp.parallelize(lambda: 3)


def test_a_model_is_split_once():
    model = tf_mp.parallelize(build(), cuts=["b"])
    with pytest.raises(ValueError, match="is split already"):
        tf_mp.parallelize(model, cuts=["c"])


def test_overridden_steps_are_refused_by_name():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

        def compute_loss(self, *args, **kwargs):
            return 0.0

    image = keras.Input((6,))
    with pytest.raises(ValueError, match="Own, which overrides train_step, compute_loss"):
        tf_mp.parallelize(Own(image, keras.layers.Dense(2, name="a")(image)), cuts=["a"])


def test_a_sequential_model_without_input_is_refused():
    with pytest.raises(ValueError, match="keras.Input"):
        tf_mp.parallelize(keras.Sequential([keras.layers.Dense(2)]), cuts=[1])


@pytest.fixture
def faked_gpu(monkeypatch):
    """A GPU in the list of devices: Keras's `jit_compile="auto"` is then True."""
    real = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")

    def listed(device_type=None):
        return real(device_type) + ([gpu] if device_type in (None, "GPU") else [])

    monkeypatch.setattr(tf.config, "list_physical_devices", listed)


def test_xla_is_off_by_itself_and_refused_when_asked_for(faked_gpu):
    plain = build()
    plain.compile("sgd", "mse")
    assert plain.jit_compile is True  # so the fake works
    model = tf_mp.parallelize(build(), cuts=["b"])
    model.compile("sgd", "mse")
    assert model.jit_compile is False
    with pytest.raises(ValueError, match="jit_compile=True.*XLA cannot span devices"):
        model.compile("sgd", "mse", jit_compile=True)
    wrapped = build()
    wrapped.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    assert wrapped.jit_compile is False


def test_fewer_micro_batches_than_stages_names_the_bubble():
    with pytest.warns(UserWarning, match="1 micro-batches for 3 stages.*67% of the step"):
        tf_mp.parallelize(build(), cuts=["b", "c"], micro_batches=1)


def test_every_operation_is_in_exactly_one_stage():
    model = tf_mp.parallelize(build(), cuts=["b", "c"])
    names = [op.name for stage in tf_mp.pipeline_of(model).stages for op in stage.operations]
    assert names == ["a", "b", "c"]
