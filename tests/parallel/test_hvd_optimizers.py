"""Two ranks with half a batch each are one rank with the whole batch, for every optimizer."""

import hvd_models
import keras
import numpy as np
import pytest
from hvd_models import (
    assert_close,
    assert_in_step,
    batches,
    train,
    train_by_keras,
    train_split,
)

from tf_mp import hvd

pytestmark = pytest.mark.skipif(hvd.size() != 2, reason="two ranks")

SPECIAL = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
PLAIN = sorted(
    name
    for name, cls in vars(keras.optimizers).items()
    if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer)
    if name not in SPECIAL
)
SETTINGS = {
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
}
CHOSEN = {
    "SGD": lambda **o: keras.optimizers.SGD(0.1, momentum=0.9, **o),
    "RMSprop": lambda **o: keras.optimizers.RMSprop(0.01, momentum=0.5, **o),
    "Adam": lambda **o: keras.optimizers.Adam(0.01, **o),
}


def compare(make, tolerance=1e-5, dtype=None, data=None):
    data = data or batches()
    split = train_split(hvd.DistributedOptimizer(make()), data, dtype)
    whole = train(make(), data, dtype)
    assert_in_step(split.variables + split.optimizer.variables)
    assert_close(split.variables, whole.variables, tolerance)
    return split, whole


def test_the_list_of_optimizers_is_the_whole_list():
    assert len(PLAIN) >= 13
    assert {"SGD", "Adam", "RMSprop", "Muon", "Lion", "ScheduleFreeAdamW"} <= set(PLAIN)


@pytest.mark.parametrize("name", PLAIN)
def test_every_optimizer_equals_one_rank_on_the_doubled_batch(name):
    compare(getattr(keras.optimizers, name))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CHOSEN)
def test_settings_of_an_optimizer_see_the_gradients_of_all_ranks(name, setting):
    compare(lambda: CHOSEN[name](**SETTINGS[setting]), data=batches(6))


def test_without_averaging_the_ranks_drift_apart():
    model = train_split(keras.optimizers.SGD(0.1), batches())
    with pytest.raises(AssertionError):
        assert_in_step(model.variables)


def test_an_optimizer_for_each_part_of_the_network_is_averaged():
    def make():
        special = {".*hidden/.*": keras.optimizers.Adam(0.01)}
        chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), special)
        return keras.optimizers.MultiOptimizer(chosen)

    compare(make)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule of the user's own."""

    def __call__(self, step):
        return 0.1 * keras.ops.power(0.5, keras.ops.cast(step, "float32"))

    def get_config(self):
        return {}


def test_a_learning_rate_schedule_of_the_users_own_is_followed():
    split, _ = compare(lambda: keras.optimizers.SGD(Halving(), weight_decay=0.1))
    assert np.isclose(float(split.optimizer.learning_rate), 0.1 * 0.5**5)


@pytest.mark.parametrize("place", ["by Keras", "inside", "outside"])
@pytest.mark.parametrize("name", CHOSEN)
def test_an_infinity_on_one_rank_skips_the_same_step_on_all(name, place):
    scaled = keras.optimizers.LossScaleOptimizer
    data = batches(6)
    data[2][1][-1] = 1e30  # its gradient overflows in float16, in the share of rank 1 only

    def wrapped():
        if place == "outside":
            return hvd.DistributedOptimizer(scaled(CHOSEN[name]()))
        inner = hvd.DistributedOptimizer(CHOSEN[name]())
        return inner if place == "by Keras" else scaled(inner)

    split = (train_by_keras if place == "by Keras" else train_split)(
        wrapped(), data, "mixed_float16"
    )
    whole = train(scaled(CHOSEN[name]()), data, "mixed_float16")
    assert isinstance(split.optimizer, scaled)
    assert_in_step(split.variables + split.optimizer.variables)
    assert int(split.optimizer.iterations) == int(whole.optimizer.iterations) == 5
    assert float(split.optimizer.dynamic_scale) == float(whole.optimizer.dynamic_scale) == 2.0**14
    assert_close(split.variables, whole.variables, 2e-3)


def test_bfloat16_stays_in_step():
    compare(CHOSEN["Adam"], tolerance=2e-2, dtype="mixed_bfloat16")


@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_are_added_up_and_reduced_once(average):
    data = batches(4)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    split = train_split(optimizer, data)
    pairs = [
        [np.concatenate(arrays) for arrays in zip(*data[k : k + 2], strict=True)] for k in (0, 2)
    ]
    whole = train(keras.optimizers.SGD(0.1 if average else 0.2, momentum=0.9), pairs)
    assert_in_step(split.variables)
    assert_close(split.variables, whole.variables)
    assert int(split.optimizer.iterations) == 4  # counts passes, as Horovod does


def test_an_infinity_in_one_of_two_backward_passes_is_skipped_in_step():
    data = batches(6)
    data[2][1][-1] = 1e30
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = train_by_keras(optimizer, data, "mixed_float16")
    assert_in_step(model.variables + model.optimizer.variables)
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    assert np.isfinite(hvd_models.flat(model.variables)).all()


@pytest.mark.parametrize("eagerly", [False, True])
def test_steps_by_keras_give_the_same_weights(eagerly):
    data = batches(3)
    make = CHOSEN["RMSprop"]
    split = train_by_keras(hvd.DistributedOptimizer(make()), data, run_eagerly=eagerly)
    assert_close(split.variables, train(make(), data).variables)


def test_state_restored_before_wrapping_is_kept():
    data = batches(10)
    make = CHOSEN["RMSprop"]
    whole = train(make(), data)
    first = train(make(), data[:5])
    first.compile(hvd.DistributedOptimizer(first.optimizer), loss="mse")
    for x, y in data[5:]:
        first.train_on_batch(hvd_models.mine(x), hvd_models.mine(y))
    assert_close(first.variables, whole.variables)
    assert int(first.optimizer.iterations) == 10
