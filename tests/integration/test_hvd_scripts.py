"""Scripts in the style of Horovod's guide run at two ranks with only the import changed."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).parent / "hvd_scripts"
ROOT = SCRIPTS.parents[2]
BIN = pathlib.Path(sys.executable).parent


def run(command, timeout=600):
    """Output of a command; its whole process group ends with it."""
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    own = {"PYTHONPATH": str(ROOT), "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment = {**os.environ, **own}
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output


def run_ranks(count, script, *arguments):
    launcher = [BIN / "mpirun", "--oversubscribe", "-np", str(count)]
    if os.geteuid() == 0:
        launcher.insert(1, "--allow-run-as-root")
    return run([*launcher, sys.executable, SCRIPTS / script, *arguments])


@pytest.mark.parametrize(
    "script",
    [["own_loop.py"], ["synthetic_benchmark.py", "--fp16-allreduce"]],
    ids=lambda script: script[0],
)
def test_a_script_of_the_guide_ends_in_step_on_both_ranks(script):
    output = run_ranks(2, *script)
    assert "rank 0 of 2 done" in output
    assert "rank 1 of 2 done" in output


def test_process_sets_of_one_and_of_two_ranks_train_for_themselves():
    output = run_ranks(3, "process_sets.py")
    assert all(f"rank {rank} of 3 done" in output for rank in range(3)), output


def test_the_script_with_all_callbacks_ends_in_step_on_both_ranks(tmp_path):
    output = run_ranks(2, "plain.py", tmp_path)
    assert "rank 0 of 2 done" in output
    assert "rank 1 of 2 done" in output
    assert "finished gradual learning rate warmup" in output
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"checkpoint-{k}.keras" for k in (1, 2, 3, 4)
    ]


def test_only_the_import_differs_from_a_script_for_horovod():
    for script in ("plain.py", "own_loop.py", "synthetic_benchmark.py"):
        text = (SCRIPTS / script).read_text()
        assert text.count("tf_mp") == 1
        assert "\nimport tf_mp.hvd as hvd" in text


def test_a_rank_is_killed_the_other_goes_on_and_a_new_one_joins(tmp_path):
    discovery = tmp_path / "hosts.sh"
    discovery.write_text(
        f"#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n"
        f"if test -e {tmp_path}/alone; then echo $(uname -n):1; fi\n"
    )
    discovery.chmod(0o755)
    launcher = [BIN / "horovodrun", "--gloo", "--network-interfaces", "lo", "-np", "2"]
    launcher += ["--gloo-timeout-seconds", "300", "--elastic-timeout", "600"]
    limits = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", discovery]
    output = run([*launcher, *limits, sys.executable, SCRIPTS / "elastic.py", tmp_path])
    assert "size 1" in output  # the rank that was left went on alone
    ends = re.findall(r"end: rank (\d) size 2 epoch 3 weights (\w+)", output)
    assert sorted(rank for rank, _ in ends) == ["0", "1"], output
    assert len({weights for _, weights in ends}) == 1
