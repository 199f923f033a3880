"""A data set is prepared once and in one piece, whoever else wants it and whoever is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tf_mp import claim, datasets, preparation
from tf_mp.datasets import DataError, find
from tf_mp.preparation import prepare

ROOT = Path(__file__).parents[2]

# Stands in for the importer: quick, without TensorFlow; writes a set as TFDS would, file by file.
FAKE = textwrap.dedent(
    """
    import json, os, pathlib, sys, threading, time
    task = json.loads(sys.argv[1])
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    with open(pathlib.Path(task["stage"]).parents[2] / "starts.log", "a") as log:
        log.write("start\\n")
    if os.environ.get("FAKE_FAILS"):
        time.sleep(float(os.environ["FAKE_FAILS"]))
        print("ConnectionError: no route to the data", file=sys.stderr)
        sys.exit(1)
    home = pathlib.Path(task["stage"]) / task["name"] / "1.0.0"
    home.mkdir(parents=True)
    info = {"splits": [{"name": "train", "shardLengths": ["5", "5"]}]}
    (home / "dataset_info.json").write_text(json.dumps(info))
    (home / "features.json").write_text("{}")
    for shard in range(2):
        time.sleep(float(os.environ.get("FAKE_SECONDS", "0.2")))
        (home / f"x-train.tfrecord-0000{shard}-of-00002").write_text("data")
    """
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package with the stand-in."""
    package = tmp_path_factory.mktemp("fake") / "tf_mp"
    shutil.copytree(ROOT / "tf_mp", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "importer.py").write_text(FAKE)
    return package


@pytest.fixture(autouse=True)
def fake_importer(package, monkeypatch):
    monkeypatch.setattr(preparation, "__file__", str(package / "preparation.py"))
    monkeypatch.setattr(preparation, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(preparation, "STEP_SECONDS", 0.05)
    return package.parent


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


def start_process(fake_importer, folder, **environment):
    """Prepares in a process of its own; its last line of output is the path or the error."""
    code = (
        "import sys; from tf_mp.preparation import prepare\n"
        "try: print(prepare('digits', sys.argv[1]))\n"
        "except Exception as error: print(error); sys.exit(3)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=fake_importer,
        env={**os.environ, "PYTHONPATH": str(fake_importer), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def num_starts(folder):
    return len((folder / "starts.log").read_text().split())


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def half_sets(folder):
    """Sets in their place that are not whole."""
    return [path for path in folder.glob("digits/*") if len(list(path.iterdir())) != 4]


def litter(folder):
    return sorted(p.name for p in folder.iterdir() if p.name not in ("digits", "starts.log"))


def test_a_set_is_prepared_in_its_place_and_nothing_else_stays(folder):
    assert prepare("digits", folder) == folder / "digits" / "1.0.0" == find("digits", folder)
    assert litter(folder) == []


def test_a_prepared_set_is_used_as_it_is(folder):
    prepare("digits", folder)
    prepare("digits", folder)
    assert num_starts(folder) == 1


def test_three_processes_at_once_prepare_once(fake_importer, folder):
    processes = [start_process(fake_importer, folder) for _ in range(3)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert {output.strip() for output in outputs} == {str(folder / "digits" / "1.0.0")}
    assert num_starts(folder) == 1 and litter(folder) == []


def test_a_process_killed_in_the_middle_leaves_no_half_set_and_the_waiting_one_goes_on(
    fake_importer, folder
):
    first = start_process(fake_importer, folder, FAKE_SECONDS="30")
    wait_for(lambda: list(folder.glob(".preparing.digits/*/work/digits/1.0.0/features.json")))
    second = start_process(fake_importer, folder)
    time.sleep(0.5)
    assert second.poll() is None and num_starts(folder) == 1  # It waits.
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert half_sets(folder) == []
    second.communicate(timeout=60)
    assert second.returncode == 0 and half_sets(folder) == [] and litter(folder) == []
    assert find("digits", folder)


def test_the_importer_ends_with_a_parent_that_was_killed(fake_importer, folder):
    first = start_process(fake_importer, folder, FAKE_SECONDS="2")
    wait_for(lambda: list(folder.glob(".preparing.digits/*/work/digits/1.0.0/features.json")))
    first.kill()
    first.wait()
    time.sleep(4.5)  # Longer than the importer's remaining work.
    assert not list(folder.glob(".preparing.digits/*/work/digits/1.0.0/*-of-*"))


def test_a_dead_owner_on_another_host_is_seen_by_its_beat(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(claim.socket, "gethostname", lambda: "elsewhere")
    assert claim.take(folder, "digits")
    monkeypatch.undo()
    monkeypatch.setattr(claim, "DEAD_SECONDS", 0.5)
    watch = claim.Watch(folder, "digits")
    assert not watch.free()
    wait_for(watch.free, 5.0)


def test_a_living_owner_keeps_its_claim_however_long_it_works(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(claim, "DEAD_SECONDS", 0.4)
    held, watch = claim.take(folder, "digits"), claim.Watch(folder, "digits")
    for _ in range(12):
        held.beat()
        assert not watch.free()
        time.sleep(0.1)
    assert held.held() and claim.take(folder, "digits") is None


def test_an_owner_that_was_buried_does_not_touch_its_heirs_claim(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(claim, "DEAD_SECONDS", 0.0)
    late, watch = claim.take(folder, "digits"), claim.Watch(folder, "digits")
    watch.free()
    assert watch.free()
    heir = claim.take(folder, "digits")
    late.beat()
    late.fail("too late")
    late.release()
    assert heir.held() and not late.held() and heir.work.is_dir()


def test_a_failure_reaches_those_who_wait_with_its_cause(fake_importer, folder, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "4")  # Long enough for both processes to be there.
    start = time.monotonic()
    processes = [start_process(fake_importer, folder) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [3, 3]
    assert all("no route to the data" in output for output in outputs)
    assert time.monotonic() - start < 30
    assert num_starts(folder) == 1 and litter(folder) == []


def test_an_error_says_what_to_put_where(folder, monkeypatch):
    monkeypatch.setenv("FAKE_FAILS", "0")
    with pytest.raises(DataError) as caught:
        prepare("digits", folder)
    for words in ("no route", f"{folder}/digits", "--dataset digits --idx DIR", "Without the net"):
        assert words in str(caught.value)


def in_step(folders, monkeypatch):
    """Runs the ranks of a job as threads; returns each one's outcome."""
    barrier, values, outcomes = threading.Barrier(len(folders)), {}, {}

    def run(rank):
        def exchange(value, what):
            values[rank] = json.loads(json.dumps(value))
            barrier.wait(30)
            everyone = [values[r] for r in range(len(folders))]
            barrier.wait(30)
            return everyone

        work = preparation._Preparation("digits", folders[rank], None)
        try:
            preparation._in_step(work, SimpleNamespace(rank=rank), exchange)
            outcomes[rank] = work.found
        except Exception as error:
            outcomes[rank] = error
        finally:
            work.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(folders))]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    return [outcomes[rank] for rank in range(len(folders))]


def test_ranks_that_share_a_folder_prepare_once_and_others_for_themselves(tmp_path, monkeypatch):
    shared, own = tmp_path / "shared", tmp_path / "own"
    outcomes = in_step([shared, shared, own], monkeypatch)
    assert outcomes == [shared / "digits/1.0.0", shared / "digits/1.0.0", own / "digits/1.0.0"]
    assert num_starts(shared) == num_starts(own) == 1


def test_the_failure_of_one_rank_is_every_ranks_with_the_rank_and_the_cause(tmp_path, monkeypatch):
    good, bad = tmp_path / "good", tmp_path / "a_file" / "data"
    bad.parent.write_text("no folder can be made in here")
    start = time.monotonic()
    outcomes = in_step([good, good, bad], monkeypatch)
    assert {str(outcome).partition(" (")[0] for outcome in outcomes} == {
        f"Rank 2: Cannot write to the data folder {bad}"
    }
    assert time.monotonic() - start < 20 and litter(good) == []


def test_a_set_that_a_person_copied_in_part_is_refused(folder):
    path = prepare("digits", folder)
    (path / "x-train.tfrecord-00001-of-00002").unlink()
    with pytest.raises(DataError, match="1 data file.*Expected 2.*copied in part"):
        prepare("digits", folder)


def test_a_folder_in_the_way_is_named(folder):
    (folder / "digits" / "1.0.0" / "something").mkdir(parents=True)
    with pytest.raises(DataError, match="holds no whole data set, delete it"):
        prepare("digits", folder)


def test_the_newest_version_is_found_and_unfinished_ones_are_not(folder):
    path = prepare("digits", folder)
    for name in ("1.2.0", "1.10.0", "incomplete.AB12CD_2.0.0"):
        shutil.copytree(path, folder / "digits" / name)
    assert find("digits", folder).name == "1.10.0"
    assert find("digits:1.2.0", folder).name == "1.2.0"
    assert find("digits:3.0.0", folder) is None


def test_configurations_are_found_by_name_and_a_choice_is_asked_for(folder):
    path = prepare("digits", folder)
    for name in ("a", "b"):
        shutil.copytree(path, folder / "letters" / name / "1.0.0")
    assert find("letters/b", folder) == folder / "letters/b/1.0.0"
    with pytest.raises(DataError, match="Name one: letters/a, letters/b"):
        find("letters", folder)


@pytest.mark.parametrize("name", ["../mnist", "/mnist", "", "MNIST data"])
def test_a_name_that_is_none_is_refused(folder, name):
    with pytest.raises(DataError, match="Expected a name as TFDS writes it"):
        prepare(name, folder)


def test_the_default_folder_is_that_of_tfds(monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", "/somewhere/else")
    assert datasets.data_folder() == Path("/somewhere/else")
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert datasets.data_folder() == Path.home() / "tensorflow_datasets"
