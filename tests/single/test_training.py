"""What surrounds `fit`: the rate, a resumed run's settings, the progress, the summary."""

import json
import math
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_mp import evaluation, stop, training, world
from tf_mp.checkpoint import Checkpoints
from tf_mp.progress import Progress

IMAGES = np.random.default_rng(0).random((12, 3), np.float32)
LABELS = np.arange(12) % 2


@pytest.fixture
def model():
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("sgd", loss, metrics=["accuracy"], run_eagerly=True)
    return net


def test_the_rate_is_a_thousandth_for_each_hundred_samples():
    assert training.learning_rate(100) == 0.001
    assert training.learning_rate(400) == 0.004


def test_the_rate_rises_in_a_straight_line_and_stays():
    rate = training.learning_rate(200, warmup_steps=4)
    found = [float(rate(step)) for step in range(7)]
    expected = [0.0005 + 0.0015 * min(step, 4) / 4 for step in range(7)]
    assert found == pytest.approx(expected)


def test_the_plan_of_a_run_is_in_numbers_of_all_ranks(monkeypatch):
    monkeypatch.setattr(world, "current", lambda: world.World(size=3))
    wanted = {"global_batch": 30, "global_micro_batches": 12}
    assert training.plan(10, stages=2) == wanted
    assert training.plan(10, stages=1)["global_micro_batches"] == 3
    assert training.plan(2, stages=2, micro_batches=5)["global_micro_batches"] == 6


def test_signals_go_back_to_who_had_them_when_training_fails(model):
    before, failing = signal.getsignal(signal.SIGTERM), keras.callbacks.Callback()
    failing.on_train_batch_end = lambda batch, logs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        training.fit(model, tf.data.Dataset.from_tensors((IMAGES, LABELS)),
                     [stop.AgreedStop(), failing])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_with_other_settings_does_not_go_on_from_a_checkpoint(tmp_path, model):
    settings = {"dataset": "mnist", "seed": 0, "global_batch": 200}
    checkpoints = Checkpoints(tmp_path)
    assert training.resume(model, checkpoints, settings) == 0
    checkpoints.save(model, 7, configuration=settings)
    assert training.resume(model, checkpoints, settings) == 7
    with pytest.raises(ValueError, match="global_batch=100 after 200"):
        training.resume(model, checkpoints, settings | {"global_batch": 100})


def test_the_progress_is_the_mean_since_the_last_report(model, capsys, tmp_path):
    progress = Progress(8, 2, first_step=2, every=3, log_dir=tmp_path)
    model.fit(IMAGES, LABELS, batch_size=2, shuffle=False, verbose=0, callbacks=[progress])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("step ")[1].split()[0] for line in lines] == ["3/8", "6/8", "8/8"]
    assert "accuracy" in lines[0]
    assert "images/s" in lines[-1]
    assert len(progress.step_times_ms) == 4
    assert progress.images_per_second == pytest.approx(2000 / progress.step_time_ms)
    assert list(tmp_path.glob("events*"))
    # The last two batches only, and not the mean of all six.
    before = model.evaluate(IMAGES[8:], LABELS[8:], verbose=0, return_dict=True)["loss"]
    assert progress.final_loss == pytest.approx(before, abs=0.02)
    assert len(progress.losses) == 3
    assert "loss" in lines[-1]


def test_evaluation_is_that_of_the_samples_of_all_ranks(model, monkeypatch):
    """Nine samples here, three there: the mean of the two means would be another number."""
    expected = model.evaluate(IMAGES, LABELS, verbose=0, return_dict=True)
    model.evaluate(IMAGES[9:], LABELS[9:], verbose=0)
    theirs = [np.asarray(v).tolist() for m in model.metrics for v in m.variables]
    monkeypatch.setattr(world, "exchange", lambda ours, what: [ours, theirs])
    found = evaluation.evaluate(model, IMAGES[:9], LABELS[:9])
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_summary_is_valid_json_without_a_measured_step(tmp_path, capsys):
    summary = {"loss": math.nan, "devices": ["a", "b"], "steps": 1, "versions": {"keras": "3"}}
    training.report(summary, tmp_path / "new" / "summary.json")
    text = (tmp_path / "new" / "summary.json").read_text()
    assert json.loads(text) == summary | {"loss": None}
    assert "a, b" in capsys.readouterr().out


def test_weights_that_differ_between_ranks_are_an_error(model, monkeypatch):
    digest = training.digest_of_weights(model)
    assert len(digest) == 64
    model.layers[-1].kernel.assign(model.layers[-1].kernel + 1e-7)
    assert training.digest_of_weights(model) != digest
    monkeypatch.setattr(world, "exchange", lambda ours, what: [ours, digest])
    with pytest.raises(ValueError, match="weights_sha256.*rank 1 has"):
        training.digest_of_weights(model)
