"""The commands of the README: each runs here as it stands there, or it is known where it runs."""

import os
import re
import shlex
import shutil
import subprocess

import few_images
import pytest
from launching import BIN, ROOT, Run

TEXT = ROOT.joinpath("README.md").read_text()
ELASTIC = "CPU_SLOTS=2 horovodrun --gloo"
CI = ROOT / ".ci" / "run"
#: What needs more than a test has: an engine for containers, GPUs, a registry. Run by hand.
BY_HAND = {
    "docker build -t tf_mp .", "docker build", "docker run --rm tf_mp", "docker run",
    "docker stop", "make gpu-check", "make wheelhouse",
}  # fmt: skip
#: Parts of others: `make train` calls horovodrun, and `make setup` before it.
PARTS = {"horovodrun -np 2 python scripts/train.py", "horovodrun -H", "make setup"}


def blocks():
    """The lines of the code blocks that are commands, a command each."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S):
        if language:
            continue
        yield from block.replace("\\\n", " ").strip().splitlines()


def inline():
    """Commands between backquotes in the text, line breaks undone."""
    prose = re.sub(r"^```\w*\n.*?^```", "", TEXT, flags=re.M | re.S)
    words = re.findall(r"`([^`]+)`", prose)
    return {
        " ".join(word.split()) for word in words
        if word.startswith(("make ", "docker ", "horovodrun ", "tf-mp ")) and " " in word.strip()
    }  # fmt: skip


def test_no_command_is_unknown():
    known = {"make train", "make test", *BY_HAND, *PARTS}
    tested = "tf-mp verify", ELASTIC
    assert {line for line in blocks() if not line.startswith(tested)} <= known
    tools = {text for text in inline() if text.startswith("tf-mp ")}
    assert inline() - tools <= known
    assert {text.split()[1] for text in tools} <= {"verify", "plan"}
    assert "exec make test" in CI.read_text()


@pytest.mark.parametrize("more, code", [(" --usual-idiom", 1), ("", 0)])
def test_the_proof_of_the_example(more, code):
    command = f"tf-mp verify --model mnist_cnn{more}"
    assert command in list(blocks())
    words = shlex.split(command)
    ran = subprocess.run(
        [BIN / words[0], *words[1:]], capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "80"},
    )  # fmt: skip
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert ("stray" in ran.stdout) == bool(code)


@pytest.mark.skipif(not shutil.which("make"), reason="the image has no make: it is set up already")
def test_make_train(tmp_path):
    assert "make train" in list(blocks())
    environment = {**os.environ, "RUNS_DIR": str(tmp_path), "VENV": str(BIN.parent)}
    environment["ARGS"] = "--steps 3 --batch-size 20"
    ran = subprocess.run(
        ["make", "train"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert '"steps": 3' in (tmp_path / "train" / "summary.json").read_text()


def test_the_elastic_line(tmp_path):
    [command] = [line for line in blocks() if line.startswith(ELASTIC)]
    setting, *words = shlex.split(command)
    at = words.index("python")
    images = few_images.prepare(tmp_path)
    more = [*images, "--steps", "4", "--batch-size", "20", "--summary", tmp_path / "summary.json"]
    with Run(
        *words[at + 1 :], *more, launcher=words[:at], log=tmp_path / "log",
        **dict([setting.split("=")]),
    ) as run:  # fmt: skip
        assert run.wait() == 0, run.output
        assert '"steps": 4' in (tmp_path / "summary.json").read_text()
