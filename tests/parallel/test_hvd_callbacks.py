"""Callbacks at two ranks: equal starts, common metrics, rates by formula, agreed stops."""

import hvd_models
import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_mp import hvd

pytestmark = pytest.mark.skipif(hvd.size() != 2, reason="two ranks")

Broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback


class Watch(keras.callbacks.Callback):
    """What a callback at this place of the list sees."""

    def __init__(self, see=lambda model: None):
        super().__init__()
        self.see = see
        self.before, self.after, self.epochs = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.before.append(self.see(self.model))

    def on_train_batch_end(self, batch, logs=None):
        self.after.append(self.see(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def fit(model, samples=8, callbacks=(), data=None, **options):
    x, y = (np.concatenate(arrays) for arrays in zip(*hvd_models.batches(4), strict=True))
    x, y = data or (x[hvd.rank() :: 2][:samples], y[hvd.rank() :: 2][:samples])
    options = {"batch_size": 4, "verbose": 0, "shuffle": False, **options}
    return model.fit(x, y, callbacks=list(callbacks), **options)


def different(kind):
    """A model with other weights on each rank, built before `fit` or by its first batch."""
    model = hvd_models.network(seed=100 + hvd.rank())
    if kind == "lazy":
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
    if kind == "lazy and eager":
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
    rate = 0.01 * (1 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.RMSprop(rate, momentum=0.5))
    model.compile(optimizer, loss="mse", run_eagerly=kind.endswith("eager"))
    return model


@pytest.mark.parametrize("kind", ["built", "lazy", "lazy and eager"])
def test_every_rank_starts_the_first_step_with_the_roots_values(kind):
    model = different(kind)
    seen = {}

    def remember(data, step=model.train_step):
        if not seen:  # traced or run for the first time: the step itself has not run yet
            with tf.init_scope():
                seen["variables"] = hvd_models.flat(model.variables)
        return step(data)

    model.train_step = remember
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.01, 1)
    fit(model, callbacks=[Broadcast(0), warmup])
    start = hvd_models.of_all_ranks(seen["variables"])
    assert len(seen["variables"]) > 10
    assert np.array_equal(start[0], start[1])
    hvd_models.assert_in_step(model.variables + model.optimizer.variables)
    assert float(model.optimizer.learning_rate) == np.float32(0.01)


def test_a_restored_optimizer_is_broadcast_with_its_state():
    model = different("built")
    if hvd.rank() == 0:
        model.optimizer.build(model.trainable_variables)
        model.optimizer.variables[-1].assign(model.optimizer.variables[-1] + 7.0)
        model.optimizer.variables[0].assign(41)
    fit(model, callbacks=[Broadcast(0)])
    assert int(model.optimizer.iterations) == 43
    hvd_models.assert_in_step(model.optimizer.variables)


def test_local_variables_are_not_broadcast():
    model = different("built")
    own = model.trainable_variables[0].numpy()
    callback = Broadcast(0, local_variables=model.trainable_variables[0])
    callback.set_model(model)
    callback.set_params({"steps": 2})
    callback.on_train_begin()
    assert np.array_equal(model.trainable_variables[0].numpy(), own)
    hvd_models.assert_in_step(model.trainable_variables[1:])


def test_ranks_that_differ_in_a_variable_are_named_on_every_rank():
    width = 4 + hvd.rank()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width, name="wide")])
    words = r"rank 0: \['\S*wide/kernel', \[3, 4\].*rank 1.*\[3, 5\]"
    with pytest.raises(ValueError, match=words):
        hvd.broadcast_variables(model.variables, root_rank=0)


def test_ranks_that_differ_in_their_steps_are_named_before_the_first():
    model = different("built")
    with pytest.raises(ValueError, match="rank 1 has 1 where rank 0 has 2"):
        fit(model, samples=8 if hvd.rank() == 0 else 4, callbacks=[Broadcast(0)])


def test_an_optimizer_that_nobody_wrapped_is_warned_about():
    model = hvd_models.network()
    model.compile(keras.optimizers.SGD(), loss="mse")
    with pytest.warns(UserWarning, match=r"not wrapped, on 2 ranks.*hvd.DistributedOptimizer"):
        fit(model, callbacks=[Broadcast(0)])


def test_metrics_are_weighted_by_the_samples_behind_them():
    model = hvd_models.network()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse", metrics=["mae"])
    x, y = hvd_models.batches(1)[0]
    sizes = (2, 6)  # one batch on each rank, of another size
    own = slice(0, 2) if hvd.rank() == 0 else slice(2, 8)
    see = Watch()
    history = fit(
        model,
        data=(x[own], y[own]),
        batch_size=8,
        callbacks=[hvd.callbacks.MetricAverageCallback(), see],
        validation_data=(x[own][:2], y[own][:2]) if hvd.rank() else (x[own], y[own]),
    ).history
    predicted = model.predict_on_batch(x)
    wanted = np.abs(predicted - y).mean()
    assert np.isclose(see.epochs[0]["mae"], wanted, rtol=1e-6), sizes
    assert np.isclose(see.epochs[0]["loss"], np.square(predicted - y).mean(), rtol=1e-6)
    some = [0, 1, 2, 3]
    assert np.isclose(history["val_mae"][0], np.abs(predicted - y)[some].mean(), rtol=1e-6)


def test_metrics_that_only_one_rank_has_are_named_not_hung_on():
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(different("built"))
    logs = {"loss": 1.0} if hvd.rank() else {"loss": 1.0, "val_loss": 2.0}
    with pytest.raises(ValueError, match=r"rank 0: \['val_loss'\]; rank 1: \[\]"):
        callback.on_epoch_end(0, logs)


def test_validation_on_one_rank_only_raises_on_both():
    model = different("lazy")
    x, y = hvd_models.batches(1)[0]
    validation = (x, y) if hvd.rank() == 0 else None
    callbacks = [Broadcast(0), hvd.callbacks.MetricAverageCallback()]
    with pytest.raises(ValueError, match="behind a test of the rank"):
        fit(model, validation_data=validation, callbacks=callbacks)


def test_statistics_of_batch_normalisation_are_common_in_validation_and_at_the_end():
    model = different("lazy")
    moving = {}

    class Validation(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            moving["at validation"] = self.model.layers[1].moving_mean.numpy()

        def on_train_batch_end(self, batch, logs=None):
            moving.setdefault("first batch", self.model.layers[1].moving_mean.numpy())

    x, y = hvd_models.batches(1)[0]
    fit(model, callbacks=[Broadcast(0), Validation()], validation_data=(x, y))
    first = hvd_models.of_all_ranks(moving["first batch"])
    assert not np.array_equal(first[0], first[1])
    common = hvd_models.of_all_ranks(moving["at validation"])
    assert np.array_equal(common[0], common[1])
    hvd_models.assert_in_step(model.variables)


def test_synchronised_batch_normalisation_sees_the_batches_of_all_ranks():
    def trained(layer, share, optimizer, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(2)])
        model.compile(optimizer, loss="mse", **options)
        for x, y in hvd_models.batches(3):
            model.train_on_batch(share(x), share(y))
        return model

    split = trained(
        hvd.SyncBatchNormalization(name="norm"),
        hvd_models.mine,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
    )
    plain = keras.layers.BatchNormalization(name="norm")
    whole = trained(plain, lambda array: array, keras.optimizers.SGD(0.1), run_eagerly=True)
    hvd_models.assert_in_step(split.variables)
    hvd_models.assert_close(split.variables, whole.variables)


def test_early_stopping_is_decided_on_the_mean_of_all_ranks():
    model = different("built")
    callback = hvd.callbacks.EarlyStopping(monitor="loss", patience=0)
    callback.set_model(model)
    callback.on_train_begin()
    model.stop_training = False
    for epoch, losses in enumerate([(4.0, 4.0), (5.0, 1.0), (1.0, 5.5)]):
        assert not model.stop_training, epoch
        callback.on_epoch_end(epoch, {"loss": losses[hvd.rank()]})
    assert model.stop_training
    assert callback.stopped_epoch == 2


def test_a_loss_that_is_no_number_on_one_rank_stops_all_at_the_same_batch():
    model = different("built")
    model.optimizer.learning_rate = 0.0
    x, y = (np.concatenate(arrays) for arrays in zip(*hvd_models.batches(4), strict=True))
    x, y = x[:16], y[:16]
    y[9] = np.nan if hvd.rank() == 1 else 0
    see = Watch()
    optimizer_was_given_nan = model.train_step

    def without_update(data):  # the gradient would carry the NaN to the other rank
        inputs, targets = data
        loss = model.compute_loss(inputs, targets, model(inputs))
        return {"loss": loss}

    model.train_step = without_update
    fit(model, data=(x, y), callbacks=[hvd.callbacks.TerminateOnNaN(), see])
    assert len(see.after) == 3, optimizer_was_given_nan
    assert model.stop_training


def test_only_the_root_writes_the_best_model(tmp_path):
    model = different("built")
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with pytest.raises(ValueError, match="callback.filepath"):
        callback.on_train_begin()
    callback.filepath = str(tmp_path / f"rank{hvd.rank()}.keras")
    fit(model, callbacks=[Broadcast(0), hvd.callbacks.MetricAverageCallback(), callback])
    assert (tmp_path / f"rank{hvd.rank()}.keras").exists() is (hvd.rank() == 0)


def test_ten_steps_equal_five_and_a_resume_and_five(tmp_path):
    data = hvd_models.batches(10)

    def make():
        return hvd.DistributedOptimizer(keras.optimizers.RMSprop(0.01, momentum=0.9))

    whole = hvd_models.train_by_keras(make(), data)
    first = hvd_models.train_by_keras(make(), data[:5])
    first.save(tmp_path / "half.keras")
    resumed = hvd.load_model(tmp_path / "half.keras")
    assert hvd.is_distributed(resumed.optimizer)
    for x, y in data[5:]:
        resumed.train_on_batch(hvd_models.mine(x), hvd_models.mine(y))
    for one, other in zip(
        resumed.variables + resumed.optimizer.variables,
        whole.variables + whole.optimizer.variables,
        strict=True,
    ):
        assert np.array_equal(one.numpy(), other.numpy()), one.path
