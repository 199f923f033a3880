"""The main job over two hosts by ssh, and what happens when one of them is cut off.

The hosts are network namespaces of this machine, each with its own name and sshd (two_hosts.sh).
A lost host is noticed after 25 seconds without any sign of life (`oob_tcp_keepalive_*` in Open
MPI's settings) or 30 (Gloo); the launcher then has `odls_base_sigkill_timeout` twice to end the
ranks that are left. So a run ends within a minute, and nothing is left on either side after two.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, Run, load

from tf_mp.choose import choose

HOSTS = Path(__file__).parent / "hosts" / "two_hosts.sh"
TRAIN = ROOT / "scripts" / "train.py"
HOROVODRUN = ["horovodrun", "-np", "2", "-H", "a:1,b:1", "-p", "2222"]


def call(*words):
    """What two_hosts.sh prints."""
    ran = subprocess.run(["bash", HOSTS, *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def missing():
    """Why this machine cannot play two hosts, or nothing."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for program in ("ip", "sshd", "ssh", "unshare"):
        if not shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
            return f"there is no {program} (Debian: apt-get install iproute2 openssh-server)"
    ran = subprocess.run(["ip", "netns", "add", "tfmp-trial"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "tfmp-trial"], capture_output=True, check=False)
    return "" if ran.returncode == 0 else f"no network namespaces: {ran.stderr.decode()}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """The folder of two hosts that are up, with the data set that is there."""
    why = missing()
    if why:
        pytest.skip(f"two hosts were not tried on this machine: {why}")
    folder = tmp_path_factory.mktemp("hosts")
    call("up", folder)
    yield folder
    call("down", folder)


@pytest.fixture(scope="module")
def data():
    found = choose(os.environ.get("DATA_DIR"))
    return ["--dataset", found.dataset, "--data-dir", found.data_dir, "--batch-size", "8"]


def train(hosts, launcher, *options, log):
    """A running train.py whose launcher stands on host a."""
    words = ["bash", str(HOSTS), "on", "a", str(hosts), *launcher]
    return Run(TRAIN, *options, launcher=words, log=log)


def mpirun():
    """`mpirun` of this environment, which passes on what the ranks need."""
    passed_on = ["-x", "PATH", "-x", "PYTHONPATH", "-x", "TF_MP_TEST_RUN"]
    ours = ["mpirun", "--allow-run-as-root", "--prefix", sys.prefix, "--tag-output"]
    return [*ours, *passed_on, "-np", "2", "-H", "a:1,b:1"]


LAUNCHERS = {
    "mpirun": mpirun,
    "horovodrun": lambda: [*HOROVODRUN, "--mpi-args", f"--prefix {sys.prefix}"],
    "horovodrun --gloo": lambda: [*HOROVODRUN, "--gloo", "--network-interfaces", "eth0"],
}


def left_on(hosts, seconds=60):
    """What still lives on both hosts a while later; an sshd ends its session only then."""
    limit = time.monotonic() + seconds * load()
    while call("left", hosts) and time.monotonic() < limit:
        time.sleep(0.5)
    return call("left", hosts)


ALL = "TF_MP_ALL_FAULTS" in os.environ


@pytest.mark.skipif(not ALL, reason="TF_MP_ALL_FAULTS is not set; the next test starts them too")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_main_job_runs_over_two_hosts(hosts, data, tmp_path, launcher):
    summary = tmp_path / "summary.json"
    options = [*data, "--steps", "6", "--summary", summary]
    with train(hosts, LAUNCHERS[launcher](), *options, log=tmp_path / "log") as run:
        assert run.wait() == 0, run.output
        assert not run.orphans()
    found = json.loads(summary.read_text())
    assert (found["world_size"], found["steps"], found["global_batch"]) == (2, 6, 16)
    assert not left_on(hosts)


@pytest.mark.parametrize("launcher", list(LAUNCHERS) if ALL else ["mpirun"])
def test_a_cut_off_host_ends_the_run_on_both_sides(hosts, data, tmp_path, faults, launcher):
    saved = tmp_path / "saved"
    options = [*data, "--steps", "100000", "--checkpoint-dir", saved, "--checkpoint-every", "5"]
    with train(hosts, LAUNCHERS[launcher](), *options, log=tmp_path / "log") as run:
        run.wait_for(lambda: "step 10/" in run.output)
        call("cut", "b")
        start = time.monotonic()
        try:
            code = run.wait(60 * load())
            seconds = time.monotonic() - start
            orphans = [*run.orphans(60 * load()), *left_on(hosts)]
            left = time.monotonic() - start
        finally:
            call("mend", "b")
    steps = [int(path.parent.name[5:]) for path in saved.glob("step-*/state.json")]
    faults.add("its host is cut off", 1, f"{launcher}, two hosts", "not 0", code,
               f"{seconds:.1f} (the other host {left:.1f})", len(orphans), max(steps))
    assert code not in (0, None), run.output
    assert "on node b" in run.output or "rank 1 on b" in run.output
    assert not orphans, run.output
    assert max(steps) >= 10


@pytest.mark.skipif(not ALL, reason="TF_MP_ALL_FAULTS is not set (three minutes)")
def test_an_elastic_run_goes_on_without_the_host_that_is_cut_off(hosts, data, tmp_path, faults):
    (tmp_path / "hosts").write_text("a\nb\n")
    summary = tmp_path / "summary.json"
    launcher = [
        "env", f"TF_MP_HOSTS={tmp_path / 'hosts'}", *LAUNCHERS["horovodrun --gloo"](),
        "--min-np", "1", "--max-np", "2",
        "--host-discovery-script", str(ROOT / "scripts" / "discover_hosts.sh"),
    ]
    del launcher[launcher.index("-H") : launcher.index("-H") + 2]
    options = [*data, "--steps", "60", "--elastic", "--commit-every", "5", "--summary", summary]
    with train(hosts, launcher, *options, log=tmp_path / "log") as run:
        run.wait_for(lambda: "step 10/" in run.output)
        call("cut", "b")
        start = time.monotonic()
        try:
            run.wait_for(lambda: "the ranks have changed: now 1" in run.output)
            seconds = time.monotonic() - start
            code = run.wait()
            orphans = [*run.orphans(60 * load()), *left_on(hosts)]
        finally:
            call("mend", "b")
    faults.add("its host is cut off", 1, "elastic, two hosts", 0, code,
               f"{seconds:.1f} until it goes on", len(orphans), "-")
    assert code == 0, run.output
    found = json.loads(summary.read_text())
    assert (found["world_size"], found["global_batch"], found["steps"]) == (1, 16, 60)
    assert not orphans, run.output
