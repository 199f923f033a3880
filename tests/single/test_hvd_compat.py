"""Canaries: the private names of Keras that tf_mp.hvd leans on still do what it needs."""

import keras
import tensorflow as tf

from tf_mp import compat


def test_serialise_as_gives_a_run_time_class_the_public_name_of_its_base():
    cls = type("Adam", (keras.optimizers.Adam,), {})
    compat.serialise_as(cls, keras.optimizers.Adam)
    config = keras.saving.serialize_keras_object(cls())
    assert (config["module"], config["class_name"]) == ("keras.optimizers", "Adam")
    assert config["registered_name"] is None


def test_serialise_as_gives_a_run_time_class_the_registered_name_of_its_base():
    @keras.saving.register_keras_serializable(package="canary")
    class Own(keras.optimizers.SGD):
        pass

    cls = type("Own", (Own,), {})
    compat.serialise_as(cls, Own)
    assert keras.saving.get_registered_name(cls) == "canary>Own"


def test_trainable_variables_and_the_step_counter_of_a_built_optimizer_are_found():
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    compat.build_outside(optimizer, [variable])
    assert compat.trainable_variables_of(optimizer)[0] is variable
    optimizer.apply([tf.constant(1.0)])
    assert int(compat.step_counter(optimizer)) == 1
    assert int(optimizer.iterations) == 0


def test_state_is_what_batch_normalisation_keeps_and_not_a_frozen_weight():
    frozen = keras.layers.Dense(2)
    layers = [frozen, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    frozen.trainable = False
    names = [variable.name for variable in compat.floating_state(model)]
    assert names == ["moving_mean", "moving_variance"]


def test_a_lazy_model_is_built_from_the_shapes_of_an_iterator():
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("adam", loss="mse", metrics=["mae"])
    assert not compat.is_built(model)
    data = tf.data.Dataset.from_tensors((tf.ones((4, 3)), tf.ones((4, 1))))
    assert compat.build_from(model, iter(data))
    assert compat.is_built(model)
    assert model.optimizer.built
    assert not compat.build_from(model, None)


def test_compile_asks_the_trainer_about_xla_in_the_two_places_that_are_replaced():
    assert compat.auto_jit_compile.__name__ == "_resolve_auto_jit_compile"
    assert isinstance(compat.Trainer.jit_compile, property)
    assert issubclass(keras.Model, compat.Trainer)
