"""The learning rate at every step against a closed formula, for every optimizer, with resume."""

import hvd_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from test_hvd_optimizers import PLAIN

from tf_mp import hvd

pytestmark = pytest.mark.skipif(hvd.size() != 2, reason="two ranks")

EPOCHS, STEPS, RATE = 4, 2, 0.4


class Rates(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.rates, self.momenta = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))
        momentum = getattr(self.model.optimizer, "momentum", 0.0)
        self.momenta.append(float(tf.convert_to_tensor(momentum)))


def warmup(position, epochs=2):
    """The rate of the warm-up at a batch, counted from the very first one."""
    epoch = (position + 1) / STEPS
    return RATE if epoch > epochs else RATE / 2 * (epoch * (2 - 1) / epochs + 1)


def model_with(optimizer, **options):
    model = hvd_models.network()
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse", **options)
    return model


def data(known=True):
    x, y = (np.concatenate(arrays) for arrays in zip(*hvd_models.batches(STEPS), strict=True))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(hvd_models.BATCH)
    return batches if known else batches.filter(lambda *_: True)


def rates_of(model, callback, epochs=EPOCHS, known=True, **options):
    see = Rates()
    model.fit(data(known), epochs=epochs, verbose=0, callbacks=[callback, see], **options)
    return see


@pytest.mark.parametrize("name", PLAIN)
def test_warmup_follows_the_formula_and_resumes_in_the_middle(name):
    model = model_with(getattr(keras.optimizers, name)(learning_rate=RATE), run_eagerly=True)
    rates = rates_of(model, hvd.callbacks.LearningRateWarmupCallback(RATE, 2), epochs=1).rates
    again = hvd.callbacks.LearningRateWarmupCallback(RATE, 2)  # a new process, in life
    rates += rates_of(model, again, initial_epoch=1).rates
    np.testing.assert_allclose(rates, [warmup(k) for k in range(EPOCHS * STEPS)], rtol=1e-6)


def test_warmup_over_data_of_unknown_length_with_given_steps():
    model = model_with(keras.optimizers.SGD(RATE, momentum=0.9))
    callback = hvd.callbacks.LearningRateWarmupCallback(RATE, 2, steps_per_epoch=STEPS)
    rates = rates_of(model, callback, known=False).rates
    rates = [rates[e * (STEPS + 1) + b] for e in range(EPOCHS) for b in range(STEPS)]
    np.testing.assert_allclose(rates, [warmup(k) for k in range(EPOCHS * STEPS)], rtol=1e-6)


def test_warmup_over_data_of_unknown_length_counts_its_first_epoch_and_says_so():
    model = model_with(keras.optimizers.RMSprop(RATE))
    callback = hvd.callbacks.LearningRateWarmupCallback(RATE, 2)
    with pytest.warns(UserWarning, match="steps_per_epoch"):
        rates = rates_of(model, callback, known=False).rates
    assert np.allclose(rates[:STEPS], RATE / 2)
    assert np.isclose(rates[-1], RATE)
    assert callback.steps_per_epoch == STEPS


def test_a_staircase_multiplies_at_each_epoch_between_two():
    model = model_with(keras.optimizers.Adam(RATE))
    callback = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.5, start_epoch=1, end_epoch=3)
    rates = rates_of(model, callback).rates
    expected = np.repeat([RATE, RATE, RATE / 2, RATE / 2], STEPS)
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_a_function_of_the_epoch_is_followed_at_each_batch():
    model = model_with(keras.optimizers.Adam(RATE))
    callback = hvd.callbacks.LearningRateScheduleCallback(
        RATE, lambda epoch: 1 / (1 + epoch), staircase=False
    )
    wanted = [RATE / (1 + k / STEPS) for k in range(EPOCHS * STEPS)]
    found = rates_of(model, callback)
    np.testing.assert_allclose(found.rates, wanted, rtol=1e-6)
    assert np.isclose(found.model.history.history["lr"][-1], wanted[-1])


def corrected(optimizer_name, rates, momentum):
    """Plain Keras steps with the rates and the corrected momenta set by hand."""
    make = getattr(keras.optimizers, optimizer_name)
    model = hvd_models.network()
    model.compile(make(rates[0], momentum=momentum), loss="mse", run_eagerly=True)
    old = RATE
    batches = hvd_models.batches(STEPS) * EPOCHS
    for rate, (x, y) in zip(rates, batches, strict=True):
        model.optimizer.learning_rate = rate
        model.optimizer.momentum = momentum * rate / old
        model.train_on_batch(x, y)
        old = rate
    return model


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_momentum_is_corrected_for_each_change_of_the_rate(name):
    momentum = 0.9
    model = model_with(getattr(keras.optimizers, name)(RATE, momentum=momentum))
    found = rates_of(model, hvd.callbacks.LearningRateWarmupCallback(RATE, 2))
    rates = [warmup(k) for k in range(EPOCHS * STEPS)]
    olds = [RATE, *rates[:-1]]
    wanted = [momentum * new / old for new, old in zip(rates, olds, strict=True)]
    np.testing.assert_allclose(found.momenta, wanted, rtol=1e-6)
    hvd_models.assert_close(model.variables, corrected(name, rates, momentum).variables, 2e-3)
    config = model.optimizer.get_config()
    assert config["momentum"] == momentum
    assert type(getattr(keras.optimizers, name).from_config(config).momentum) is not None


def test_without_correction_the_momentum_stays():
    model = model_with(keras.optimizers.SGD(RATE, momentum=0.9))
    callback = hvd.callbacks.LearningRateWarmupCallback(RATE, 2, momentum_correction=False)
    assert set(np.float32(rates_of(model, callback).momenta)) == {np.float32(0.9)}


def test_a_rate_that_has_its_own_schedule_is_refused_in_one_sentence():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = model_with(keras.optimizers.SGD(schedule))
    with pytest.raises(ValueError, match="LearningRateSchedule has its own formula"):
        rates_of(model, hvd.callbacks.LearningRateWarmupCallback(RATE, 2))
