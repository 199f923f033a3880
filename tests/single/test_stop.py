"""A signal ends training after a step, saved; a lost loss ends it unsaved; never with code 0."""

import os
import signal

import keras
import numpy as np
import pytest

from tf_mp import stop, world
from tf_mp.world import World

IMAGES, LABELS = np.ones((6, 2), np.float32), np.zeros((6, 1), np.float32)


class At(keras.callbacks.Callback):
    """Does something at the end of the second step."""

    def __init__(self, act):
        super().__init__()
        self.steps, self.act = 0, act

    def on_train_batch_begin(self, batch, logs=None):
        self.steps += 1
        if self.steps == 2:
            self.act(self.model)


def fit(act, save=None):
    """Trains six steps and returns how many were made, and what ended it."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    at = At(act)
    try:
        model.fit(IMAGES, LABELS, batch_size=1, verbose=0, callbacks=[at, stop.AgreedStop(save)])
    except BaseException as error:  # noqa: B036 (a stop is a SystemExit, looked at by the tests)
        return at.steps, error
    return at.steps, None


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)]
)
def test_a_signal_lets_the_step_end_saves_and_exits(number, code):
    saved = []
    steps, error = fit(lambda model: os.kill(os.getpid(), number), lambda: saved.append(1))
    assert (steps, saved) == (2, [1])
    assert isinstance(error, SystemExit)
    assert error.code == code


def test_a_second_ctrl_c_ends_at_once():
    def twice(model):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    saved = []
    steps, error = fit(twice, lambda: saved.append(1))
    assert isinstance(error, KeyboardInterrupt)
    assert not saved


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_ends_training_without_saving(value):
    saved = []
    steps, error = fit(
        lambda model: model.layers[-1].bias.assign([value]), lambda: saved.append(1)
    )
    assert isinstance(error, FloatingPointError)
    assert "in step 2 of this fit" in str(error)
    assert not saved


def test_signals_go_back_to_who_had_them():
    before = [signal.getsignal(number) for number in stop._SIGNALS]
    assert fit(lambda model: None) == (6, None)
    assert [signal.getsignal(number) for number in stop._SIGNALS] == before


def test_the_death_of_horovodruns_shell_counts_as_a_signal(monkeypatch):
    """Under MPI it is a shell around mpirun that passes no signal on."""
    monkeypatch.setattr(stop, "_shell_of_horovodrun", lambda: os.getpid())
    grandparents = iter([os.getpid(), os.getpid(), 1])
    monkeypatch.setattr(stop, "_grandparent", lambda: next(grandparents))
    steps, error = fit(lambda model: None)
    assert steps == 3
    assert isinstance(error, SystemExit)
    assert error.code == 143


def test_no_shell_of_horovodrun_is_seen_where_there_is_none():
    assert stop._grandparent() > 0
    assert stop._shell_of_horovodrun() is None


def test_data_of_unknown_length_are_refused_where_ranks_would_wait(monkeypatch):
    callback = stop.AgreedStop()
    callback.set_params({"steps": None})
    monkeypatch.setattr(world, "current", lambda: World(size=2))
    with pytest.raises(ValueError, match="unknown length on 2 ranks.*steps_per_epoch"):
        callback.on_train_begin()


def fail(error):
    def main():
        raise error

    return main


def test_our_own_errors_are_told_without_a_traceback_and_others_with(capsys):
    assert stop.guarded(fail(ValueError("Received: 3. Expected: 4."))) == 1
    assert capsys.readouterr().err.startswith("tf_mp: Received: 3. Expected: 4.\n")
    assert stop.guarded(fail(KeyError("cause"))) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "KeyError: 'cause'" in text
    assert stop.guarded(fail(KeyboardInterrupt())) == 130
    assert stop.guarded(lambda: None) == 0


def test_with_other_ranks_an_error_ends_this_one_at_once(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(stop.os, "_exit", codes.append)
    monkeypatch.setattr(world, "current", lambda: World(rank=1, size=2))
    stop.guarded(fail(KeyError("cause")))
    assert codes == [1]
    assert "rank 1 of 2" in capsys.readouterr().err


def test_a_lost_rank_is_named_with_its_host_and_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(stop.os, "_exit", lambda code: None)
    monkeypatch.setattr(world, "current", lambda: World(rank=0, size=2))
    monkeypatch.setattr(stop, "_hosts", ["a", "b"])
    stop.guarded(fail(RuntimeError("Node: Horovod has been shut down. This was caused by ...")))
    said = capsys.readouterr().err
    assert "no answer from another rank (rank 1 on b)" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("where", ["reasons to stop", "whether to stop early"])
def test_all_stop_with_the_rank_that_is_told_to_stop_early(monkeypatch, where):
    """After a step, or after an epoch as EarlyStopping does; here another rank is told."""

    def exchange(value, *, what):
        if what != where:
            return [value, value]
        return [value, [0, True, True] if isinstance(value, list) else True]

    monkeypatch.setattr(world, "exchange", exchange)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(IMAGES, LABELS, batch_size=3, epochs=4, verbose=0, callbacks=[stop.AgreedStop()])
    assert model.optimizer.iterations == (1 if where == "reasons to stop" else 2)
