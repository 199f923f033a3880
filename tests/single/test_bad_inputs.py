"""Whatever a person types or feeds in wrongly: one sentence, exit code 2 or 1, and no traceback.

The commands are called in this process. Each case is what was given and words of the answer.
"""

import json
import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tf_mp
from tf_mp import checkpoint, cli, idx, stop

TRAIN = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "train.py"))
MODULE = """
import keras

def model(devices=("/device:CPU:0", "/device:CPU:1")):
    x = inputs = keras.Input((4,))
    for name in "abc":
        x = keras.layers.Dense(4, name=name)(x)
    return keras.Model(inputs, x)

def raising(): return {}["the key"]
def nothing(): return None
def needing(size): return model()
def a_layer(): return keras.layers.Dense(3)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with good and bad files, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tf_mp, "init", lambda devices_per_rank=None: None)
    (tmp_path / "bad_models.py").write_text(MODULE)
    (tmp_path / "no_syntax.py").write_text("def (:\n")
    (tmp_path / "no_import.py").write_text("1 / 0\n")
    (tmp_path / "text.keras").write_text("no model")
    (tmp_path / "empty.keras").touch()
    (tmp_path / "text.h5").write_text("no model")
    (tmp_path / "a_file").write_text("no folder")
    (tmp_path / "a_folder.keras").mkdir()
    (tmp_path / "idx").mkdir()
    (tmp_path / "idx" / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03 cut short")
    yield tmp_path
    sys.modules.pop("bad_models", None)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A data folder with a set of 40 small images."""
    from tf_mp import data

    here = tmp_path_factory.mktemp("sets")
    draw = np.random.default_rng(0)
    splits = {
        split: (draw.integers(0, 256, (40, 28, 28), np.uint8), np.arange(40, dtype=np.uint8) % 10)
        for split in ("train", "test")
    }
    idx.write_folder(here, splits)
    data.prepare("few", here, here)
    return str(here)


def answer(capsys, tool):
    """The one line of the tool in what was printed to the error stream."""
    text = capsys.readouterr().err
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if line.startswith(tool)]
    return text if tool == "usage" else " ".join(lines)


TRAIN_OPTIONS = [
    ("--cuts ,", "Received: --cuts ','"),
    ("--steps 0", "at least 1"),
    ("--steps -5", "at least 1"),
    ("--steps 1.5", "'1.5'"),
    ("--steps many", "'many'"),
    ("--batch-size 0", "at least 1"),
    ("--batch-size", "expected one argument"),
    ("--stages 0", "at least 1"),
    ("--micro-batches 0", "at least 1"),
    ("--micro-batches 2,2", "'2,2'"),
    ("--schedule zigzag", "invalid choice: 'zigzag'"),
    ("--optimizer lion?", "invalid choice: 'lion?'"),
    ("--warmup-steps -1", "at least 0"),
    ("--seed -1", "at least 0"),
    ("--seed 0x10", "'0x10'"),
    ("--checkpoint-every 0", "at least 1"),
    ("--keep 0", "at least 1"),
    ("--verify=yes", "ignored explicit argument"),
    ("--dataste mnist", "unrecognized arguments"),
    ("resnet50", "unrecognized arguments"),
]
TOOL_OPTIONS = [
    ("", "required: COMMAND"),
    ("prove", "invalid choice: 'prove'"),
    ("verify --stages 0", "at least 1"),
    ("verify --stages two", "at least 1, not 'two'"),
    ("verify --micro-batches -2", "at least 1"),
    ("verify --batch-size 0", "at least 1"),
    ("verify --step back", "invalid choice: 'back'"),
    ("plan --usual-idiom", "unrecognized arguments"),
    ("timeline --steps 0", "at least 1"),
    ("timeline --trace", "expected one argument"),
    ("doctor --stages 0", "at least 1"),
    ("doctor --ranks none", "at least 1"),
    ("data --json x y", "unrecognized arguments"),
]
ASKED = [
    ("verify --model resnet51", "Expected one of"),
    ("verify --model absent.keras", "No such file"),
    ("verify --model a_folder.keras", "No such file"),
    ("verify --model text.keras", "Keras cannot load"),
    ("verify --model empty.keras", "Keras cannot load"),
    ("verify --model text.h5", "Keras cannot load"),
    ("verify --model no_such_module:build", "No module named"),
    ("verify --model no_syntax:build", "SyntaxError"),
    ("verify --model no_import:build", "ZeroDivisionError"),
    ("verify --model bad_models:absent", "has no attribute"),
    ("verify --model bad_models:", "cannot be imported"),
    ("verify --model :model", "cannot be imported"),
    ("verify --model bad_models:keras", "not a function"),
    ("verify --model bad_models:raising", "KeyError: 'the key'"),
    ("plan --model bad_models:needing", "missing 1 required positional argument"),
    ("plan --model bad_models:nothing", "Received"),
    ("plan --model bad_models:a_layer", "Received"),
    ("plan --model bad_models:model --cuts ,", "Received: --cuts ','"),
    ("plan --model bad_models:model --cuts 1,1", "operations"),
    ("plan --model bad_models:model --cuts 1,0,2", "Expected"),
    ("plan --model bad_models:model --cuts b,x", "'x'"),
    ("plan --model bad_models:model --cuts b,b", "Received"),
    ("plan --model bad_models:model --cuts c,b", "Received"),
    ("plan --model bad_models:model --cuts 2,1 --stages 3", "leave one of the two out"),
    ("plan --model bad_models:model --cuts auto --stages 9", "Received"),
    ("plan --model bad_models:model --cuts 2,1 --schedule zigzag", "'zigzag'"),
    ("plan --model bad_models:model --cuts scopes", "tf.device"),
    ("plan --model bad_models:model --cuts 2,1 --json absent/plan.json", "absent/plan.json"),
    ("plan --model bad_models:model --cuts 2,1 --png absent/plan.png", "absent"),
    ("plan --model bad_models:model --cuts 2,1 --png plan.docx", "docx"),
    ("data --dataset ../mnist --data-dir sets", "Expected a name"),
    ("data --dataset few/x --idx idx --data-dir sets", "Expected a plain name"),
    ("data --choose --idx idx --data-dir sets", "Expected one of them"),
    ("data --dataset few --idx absent --data-dir sets", "MNIST's four IDX files"),
    ("data --dataset few --idx idx --data-dir sets", "does not hold"),
    ("data --dataset few --idx idx --data-dir a_file", "Cannot write"),
]
TRAINED = [
    ("--cuts dense,nowhere", "'nowhere'"),
    ("--cuts 1,1", "operations"),
    ("--cuts auto --stages 99", "Expected"),
    ("--dataset ../x", "Expected a name"),
    ("--data-dir a_file", "Cannot write"),
    ("--batch-size 41", "41"),
    ("--checkpoint-dir a_file", "a_file"),
    ("--summary a_file/summary.json", "a_file"),
]


def test_there_are_sixty_of_them():
    assert len([*TRAIN_OPTIONS, *TOOL_OPTIONS, *ASKED, *TRAINED]) >= 60


@pytest.mark.parametrize(("line", "said"), TRAIN_OPTIONS)
def test_an_option_of_the_main_job(capsys, line, said):
    with pytest.raises(SystemExit) as ended:
        TRAIN["parse"](line.split())
    assert ended.value.code == 2
    assert said in answer(capsys, "usage")


@pytest.mark.parametrize(("line", "said"), TOOL_OPTIONS)
def test_an_option_of_the_tool(capsys, line, said):
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == 2
    assert said in answer(capsys, "usage")


@pytest.mark.parametrize(("line", "said"), ASKED)
def test_a_question_to_the_tool(here, capsys, line, said):
    assert cli.main(line.split()) in (1, 2)
    assert said in answer(capsys, "tf-mp")


@pytest.mark.parametrize(("line", "said"), TRAINED)
def test_a_run_of_the_main_job(here, sets, capsys, monkeypatch, line, said):
    good = ["--dataset", "few", "--data-dir", sets, "--batch-size", "10", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *good, *line.split()])
    assert stop.guarded(TRAIN["main"]) == 1
    assert said in answer(capsys, "tf_mp: ")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one checkpoint, its model, and what its state.json holds."""
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    net.compile("adam", "mse")
    folder = tmp_path_factory.mktemp("saved")
    checkpoint.Checkpoints(folder).save(net, 4)
    state = folder / "step-00000004" / "state.json"
    return folder, net, json.loads(state.read_text()), state


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def goes_on_without(saved, text, capsys):
    """Restores after state.json was changed: nothing, or an error of ours, or the checkpoint."""
    folder, net, _, state = saved
    state.write_bytes(text)
    try:
        restored = checkpoint.Checkpoints(folder).restore(net)
    except ValueError as error:
        assert str(error).startswith("Received: the checkpoint")
        return
    assert restored is None or isinstance(restored["step"], int)
    assert restored is not None or "skipping the damaged checkpoint" in capsys.readouterr().err


@quick
@given(text=st.binary(max_size=60))
def test_a_state_of_any_bytes_is_skipped(saved, capsys, text):
    goes_on_without(saved, text, capsys)


@quick
@given(data=st.data())
def test_a_state_with_any_entry_wrong_or_missing_is_no_crash(saved, capsys, data):
    _, _, right, _ = saved
    name = data.draw(st.sampled_from(sorted(right)))
    wrong = {key: value for key, value in right.items() if key != name}
    if data.draw(st.booleans()):
        wrong[name] = data.draw(anything)
    goes_on_without(saved, json.dumps(wrong).encode(), capsys)


def test_a_state_that_is_nested_without_end_is_skipped(saved, capsys):
    goes_on_without(saved, b"[" * 100_000, capsys)


@quick
@given(content=st.binary(max_size=40), header=st.booleans())
def test_idx_files_of_any_bytes_are_refused_with_their_name(tmp_path, content, header):
    for both in idx.FILES.values():
        for name in both:
            (tmp_path / name).write_bytes((b"\x00\x00\x08\x03" if header else b"") + content)
    with pytest.raises(ValueError, match="(Expected|Fetch)"):
        idx.read_folder(tmp_path)
