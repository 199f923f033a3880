"""`tf-mp` answers with the right exit status, with JSON, and one sentence for bad input."""

import json
import subprocess
import sys

import pytest

from tf_mp import cli

TINY = """
import keras, tensorflow as tf

def model(devices=("/device:CPU:0", "/device:CPU:1")):
    x = inputs = keras.Input((12,))
    for k, device in enumerate(devices):
        with tf.device(device):
            x = keras.layers.Dense(20, activation="relu", name=f"a{k}")(x)
            x = keras.layers.Dense(20, name=f"b{k}")(x)
    return keras.Model(inputs, x, name="tiny")

def broken():
    raise ValueError("no such thing")

number = 3
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    (tmp_path / "tiny_models.py").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    yield ["--model", "tiny_models:model", "--batch-size", "8", "--micro-batches", "2"]
    sys.modules.pop("tiny_models", None)


def test_verify_prints_the_proof_as_json(tiny, capsys):
    assert cli.main(["verify", *tiny, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["strays"] == []
    assert {"index", "device", "forward", "backward", "optimizer", "collective"} <= set(
        found["stages"][1]
    )
    assert found["stages"][1]["forward"]["MatMul"] == 4
    assert {"tensor", "from", "to", "bytes"} <= set(found["transfers"][0])


def test_json_goes_into_a_file_beside_the_tables(tiny, capsys, tmp_path):
    file = tmp_path / "proof.json"
    assert cli.main(["verify", *tiny, "--step", "predict", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["ok"] is True
    assert "OK: every operation" in capsys.readouterr().out


def test_verify_of_the_usual_idiom_exits_1_with_its_strays(tiny, capsys):
    assert cli.main(["verify", *tiny, "--usual-idiom", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["stages"][1]["forward"]["MatMul"] == 0
    assert found["stages"][1]["all"]["forward"]["MatMul"] == 2
    assert {"op", "expected", "actual", "layer"} == set(found["strays"][0])


def test_verify_draws_both_ways_beside_each_other(tiny, capsys, tmp_path):
    file = tmp_path / "both.svg"
    assert cli.main(["verify", *tiny, "--png", str(file)]) == 0
    assert "OK: every operation" in capsys.readouterr().out
    assert file.read_text().count("<!-- the usual idiom: ") == 1
    assert file.read_text().count("<!-- tf_mp: every operation") == 1


def test_plan_prints_stages_and_predictions(tiny, capsys, tmp_path):
    assert cli.main(["plan", *tiny, "--json", "--png", str(tmp_path / "plan.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"step_ms", "bubble", "speedup_bound", "stages"} <= set(found)
    assert found["stages"][0]["operations"] == ["a0", "b0"]
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_timeline_prints_planned_and_measured_actions(tiny, capsys, tmp_path):
    files = ["--trace", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]
    assert cli.main(["timeline", *tiny, "--steps", "2", "--json", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"utilisation", "bubble", "in_flight_max", "actions"} <= set(found)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.png").stat().st_size > 5000


def test_a_saved_model_can_be_looked_at(tmp_path, capsys):
    import keras

    layers = [keras.layers.Dense(20, name=name) for name in "ab"]
    net = keras.Sequential([keras.Input((12,)), *layers])
    net.compile("sgd", "mse")
    net.save(tmp_path / "net.keras")
    options = ["--model", str(tmp_path / "net.keras"), "--cuts", "1,1,0"]
    assert cli.main(["verify", *options, "--batch-size", "4"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "resnet51"], "Expected one of"),
        (["--model", "absent.keras"], "No such file"),
        (["--model", "no_such_module:build"], "cannot be imported"),
        (["--model", "tiny_models:absent"], "has no attribute 'absent'"),
        (["--model", "tiny_models:number"], "not a function"),
        (["--model", "tiny_models:broken"], "no such thing"),
        (["--schedule", "zigzag"], "zigzag"),
        (["--cuts", "no_layer"], "no_layer"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tiny, capsys, monkeypatch, arguments, said):
    import tf_mp

    monkeypatch.setattr(tf_mp, "init", lambda devices_per_rank=None: None)
    assert cli.main(["verify", *tiny, *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "tf-mp verify:" in line]
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["prove"],
        ["verify", "--stages", "0"],
        ["verify", "--micro-batches", "two"],
        ["plan", "-x"],
    ],
)
def test_bad_options_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "tf-mp" in capsys.readouterr().err


def test_debug_shows_where_an_error_came_from(tiny):
    with pytest.raises(ValueError, match="resnet51"):
        cli.main(["verify", "--model", "resnet51", "--debug"])


def test_doctor_prints_every_check(capsys, tmp_path):
    status = cli.main(["doctor", "--json", "--data-dir", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    assert {"name", "ok", "found", "wanted", "fix"} <= set(found["checks"][0])
    assert found["ok"] is (status == 0)
    cli.main(["doctor", "--data-dir", str(tmp_path)])
    assert "TensorFlow" in capsys.readouterr().out


@pytest.mark.parametrize("form", [["--json"], []])
def test_doctor_runs_where_tensorflow_is_missing(form):
    code = (
        "import sys; sys.modules.update(tensorflow=None, keras=None, horovod=None)\n"
        "from tf_mp.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *form], capture_output=True, text=True, check=False
    )
    assert "TensorFlow" in ran.stdout, ran.stderr
    assert ran.returncode in (0, 1)


def test_the_module_is_the_command():
    ran = subprocess.run(
        [sys.executable, "-m", "tf_mp", "--help"], capture_output=True, text=True, check=True
    )
    for command in ("doctor", "plan", "verify", "timeline", "data"):
        assert command in ran.stdout
