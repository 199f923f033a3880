"""`scripts/train.py` on a few real images: in step, resumed exactly, and red when it must be."""

import json
import os
import runpy
import signal
from pathlib import Path

import elastic_runs
import few_images
import keras
import numpy as np
import pytest
from launching import ROOT, Run

from tf_mp import data
from tf_mp.world import World

TRAIN = ROOT / "scripts" / "train.py"
BROKEN = Path(__file__).parent / "broken_train.py"
SUMMARY_KEYS = {
    "world_size", "stages", "devices", "micro_batches", "schedule", "global_batch", "steps",
    "final_loss", "accuracy", "images_per_second", "step_time_ms", "weights_sha256", "versions",
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Options for a data set of 1,000 real images and 201 to test with."""
    return few_images.prepare(tmp_path_factory.mktemp("data"))


def train(images, tmp_path, *more, script=(TRAIN,), ranks=2, launcher="mpirun"):
    """A running `train.py`, and where its summary will be."""
    summary = tmp_path / "summary.json"
    arguments = [*images, "--summary", summary, *more]
    return Run(*script, *arguments, ranks=ranks, launcher=launcher, log=tmp_path / "log"), summary


def weights(folder, step):
    model = keras.models.load_model(folder / f"step-{step:08d}" / "model.keras")
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


OPTIONS = ["--batch-size", "20", "--checkpoint-every", "5", "--keep", "9", "--steps", "15"]
OPTIONS += ["--optimizer", "adam"]


@pytest.fixture(scope="module")
def undisturbed(images, tmp_path_factory):
    """A run of two ranks and 15 steps: its summary, its folder, its output."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run, summary = train(
        images, folder, *OPTIONS, "--checkpoint-dir", folder / "saved",
        "--log-dir", folder / "logs", script=(elastic_runs.SCRIPT, folder, "[]"),
        launcher="horovodrun",
    )
    with run:
        assert run.wait() == 0, run.output
        return json.loads(summary.read_text()), folder, run.output


def test_two_ranks_train_in_step_and_say_what_they_did(undisturbed):
    summary, folder, output = undisturbed
    assert set(summary) == SUMMARY_KEYS
    assert (summary["world_size"], summary["stages"], summary["global_batch"]) == (2, 2, 40)
    assert summary["devices"] == ["/device:CPU:0", "/device:CPU:1"]
    assert summary["steps"] == 15
    assert 0.3 < summary["accuracy"] <= 1
    assert summary["final_loss"] < 2.3
    assert len(summary["weights_sha256"]) == 64
    assert output.count("step 10/15") == 1  # the root speaks for all
    assert list((folder / "logs").glob("events*"))


def test_the_accuracy_is_that_of_the_saved_model_on_all_test_images(undisturbed, images):
    """201 images do not divide by two ranks: a mean of the ranks' means would differ."""
    summary, folder, _ = undisturbed
    model = keras.models.load_model(folder / "saved" / "step-00000015" / "model.keras")
    test = data.load(
        "few_images", "test", batch_size=201, world=World(), seed=0, data_dir=images[-1],
        shuffle=False,
    )
    assert model.evaluate(test, verbose=0)[1] == pytest.approx(summary["accuracy"], abs=1e-6)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(undisturbed, images, tmp_path):
    summary, folder, _ = undisturbed
    saved = tmp_path / "saved"
    options = [*OPTIONS, "--checkpoint-dir", saved]
    first, _ = train(images, tmp_path, *options)
    with first:
        first.wait_for((saved / "step-00000010").exists)
        os.kill(first.rank(1), signal.SIGKILL)
        assert first.wait(30) != 0
        assert not first.orphans()
    second, path = train(images, tmp_path, *options, "--verify")
    with second:
        assert second.wait() == 0, second.output
    assert "going on from step 10" in second.output
    assert "placement proved" in second.output
    for one, other in zip(weights(folder / "saved", 15), weights(saved, 15), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert json.loads(path.read_text())["weights_sha256"] == summary["weights_sha256"]


def test_an_elastic_run_is_the_undisturbed_run_whatever_ranks_leave_and_join(
    undisturbed, images, tmp_path
):
    """Two ranks, one after a kill -9, then three that share eight micro-batches."""
    _, folder, _ = undisturbed
    events = [["kill", 6, 2, 0], ["join", 9, 1]]
    with elastic_runs.elastic(
        tmp_path, events, 2, *images, *OPTIONS, "--commit-every", "3",
        "--checkpoint-dir", tmp_path / "saved", "--summary", tmp_path / "summary.json",
    ) as run:
        assert run.wait() == 0, run.output
        assert not run.orphans(), run.output
    for size in (1, 3):
        assert f"the ranks have changed: now {size}." in run.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["world_size"], summary["global_batch"]) == (3, 40)
    assert elastic_runs.trace(tmp_path) == elastic_runs.trace(folder)
    pair = (elastic_runs.weights(where / "saved", 15) for where in (folder, tmp_path))
    assert elastic_runs.furthest(*pair) < 1e-4


@pytest.mark.parametrize("promise", ["averaging", "broadcast"])
def test_ranks_that_do_not_train_in_step_are_noticed(images, tmp_path, promise):
    run, summary = train(
        images, tmp_path, "--batch-size", "20", "--steps", "3", script=(BROKEN, promise)
    )
    with run:
        assert run.wait() not in (0, None), run.output
    assert "weights_sha256" in run.output
    assert "rank 1 has" in run.output
    assert not summary.exists()


def test_one_plain_process_needs_no_horovod(images, tmp_path):
    run, summary = train(
        images, tmp_path, "--steps", "3", "--batch-size", "30", "--warmup-steps", "2",
        script=(BROKEN, "horovod"), ranks=1, launcher=None,
    )
    with run:
        assert run.wait() == 0, run.output
    found = json.loads(summary.read_text())
    assert (found["world_size"], found["stages"], found["global_batch"]) == (1, 2, 30)


@pytest.fixture(scope="module")
def parse():
    return runpy.run_path(str(TRAIN))["parse"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "expected at least 1, received 0"),
        (["--seed", "x"], "invalid whole_number value: 'x'"),
        (["--seed", "-1"], "expected at least 0, received -1"),
        (["--schedule", "fast"], "invalid choice: 'fast'"),
        (["--cutz", "auto"], "unrecognized arguments: --cutz auto"),
    ],
)
def test_a_bad_option_is_one_sentence_and_exit_2(parse, capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_help_names_every_option_and_explains_the_words(parse, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    words = capsys.readouterr().out
    for word in ["--stages", "--cuts", "--micro-batches", "--checkpoint-dir", "A stage is"]:
        assert word in words


def test_cuts_are_a_word_names_of_layers_or_a_balance(parse):
    given = {"auto": "auto", "dense,logits": ["dense", "logits"], "5,3": [5, 3]}
    assert {text: parse(["--cuts", text]).cuts for text in given} == given
