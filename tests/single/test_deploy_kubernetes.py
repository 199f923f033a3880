"""The MPIJob against the operator's schema, and against what a split and replicated run needs."""

import copy
import re
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
SCHEMA = yaml.safe_load((Path(__file__).parent / "mpijob_schema.yaml").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
DOCUMENTS = list(yaml.safe_load_all((DEPLOY / "mpijob.yaml").read_text()))


def problems(value, schema, where="job"):
    """What of a document is not as a schema has it: the words of JSON Schema that ours uses."""
    kind = TYPES.get(schema.get("type"), object)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where}: {value!r} is no {schema['type']}"
        return
    if any(forbids(value, schema) for forbids in FORBIDDING):
        yield f"{where}: {value!r} is not what is allowed: {schema}"
    if kind is list:
        for index, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{where}[{index}]")
    if kind is dict and not schema.get("additionalProperties"):
        yield from _entries(value, schema, where)


FORBIDDING = [
    lambda value, schema: "enum" in schema and value not in schema["enum"],
    lambda value, schema: "pattern" in schema and not re.fullmatch(schema["pattern"], value),
    lambda value, schema: "maxLength" in schema and len(value) > schema["maxLength"],
    lambda value, schema: "minItems" in schema and len(value) < schema["minItems"],
    lambda value, schema: "minimum" in schema and value < schema["minimum"],
    lambda value, schema: "maximum" in schema and value > schema["maximum"],
]


def _entries(value, schema, where):
    """The same for each entry of an object."""
    for name in schema.get("required", []):
        if name not in value:
            yield f"{where}: no {name}"
    for name, item in value.items():
        if name in schema["properties"]:
            yield from problems(item, schema["properties"][name], f"{where}.{name}")
        else:
            yield f"{where}: {name} is not known"


@pytest.fixture
def job():
    return copy.deepcopy(next(one for one in DOCUMENTS if one["kind"] == "MPIJob"))


@pytest.fixture
def launcher(job):
    return job["spec"]["mpiReplicaSpecs"]["Launcher"]


@pytest.fixture
def replicas(job):
    """The pods that hold the replicas of the model."""
    return job["spec"]["mpiReplicaSpecs"]["Worker"]


def container(replica):
    (only,) = replica["template"]["spec"]["containers"]
    return only


def test_the_job_is_what_the_operator_takes(job):
    assert not list(problems(job, SCHEMA))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda job: job.update(apiVersion="kubeflow.org/v1"), "not what is allowed"),
        (lambda job: job["metadata"].update(name="A_Job"), "not what is allowed"),
        (lambda job: job["spec"].update(slotsPerWorker="2"), "is no integer"),
        (lambda job: job["spec"].update(slotsPerWorker=0), "not what is allowed"),
        (lambda job: job["spec"].update(slots=2), "slots is not known"),
        (lambda job: job["spec"]["mpiReplicaSpecs"].pop("Launcher"), "no Launcher"),
        (lambda job: job["spec"]["runPolicy"].update(cleanPodPolicy=3), "not what is allowed"),
        (lambda job: container(job["spec"]["mpiReplicaSpecs"]["Worker"]).pop("image"), "no image"),
        (
            lambda job: container(job["spec"]["mpiReplicaSpecs"]["Launcher"])["args"].append(2),
            "is no string",
        ),
    ],
)
def test_the_check_sees_what_is_wrong(job, break_it, said):
    break_it(job)
    assert any(said in problem for problem in problems(job, SCHEMA))


def test_a_slot_is_a_replica_with_a_gpu_for_each_stage(job, launcher, replicas):
    arguments = container(launcher)["args"]
    stages = int(arguments[arguments.index("--stages") + 1])
    gpus = container(replicas)["resources"]["limits"]["nvidia.com/gpu"]
    assert job["spec"]["slotsPerWorker"] == gpus // stages >= 1
    assert not {"-np", "-n", "-H", "--hostfile"} & set(arguments)  # the operator's hosts and slots
    assert "nvidia.com/gpu" not in container(launcher)["resources"]["limits"]


def test_ranks_have_memory_to_share_and_a_volume_for_checkpoints(launcher, replicas):
    volumes = {volume["name"]: volume for volume in replicas["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(replicas)["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    claim = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]["claimName"]
    (volume,) = [one for one in DOCUMENTS if one["kind"] == "PersistentVolumeClaim"]
    assert volume["metadata"]["name"] == claim
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]  # pods on several hosts mount it
    arguments = container(launcher)["args"]
    assert arguments[arguments.index("--checkpoint-dir") + 1].startswith("/checkpoints/")


def test_nothing_runs_as_root_or_gains_privileges(launcher, replicas):
    for replica in (launcher, replicas):
        assert replica["template"]["spec"]["securityContext"]["runAsNonRoot"] is True
        assert replica["template"]["spec"]["securityContext"]["runAsUser"] > 0
        assert replica["template"]["spec"]["automountServiceAccountToken"] is False
        own = container(replica)["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == {"drop": ["ALL"]}


def test_a_stopped_launcher_has_time_for_a_checkpoint_and_starts_again(launcher, job):
    seconds = launcher["template"]["spec"]["terminationGracePeriodSeconds"]
    command = container(launcher)["lifecycle"]["preStop"]["exec"]["command"]
    assert "kill -USR1 1" in command[-1]
    assert int(re.search(r"sleep (\d+)", command[-1])[1]) < seconds
    assert container(launcher)["command"] == ["mpirun"]  # process 1, which passes the signal on
    assert launcher["restartPolicy"] == "OnFailure"
    assert job["spec"]["runPolicy"]["backoffLimit"] > 0


def test_sshd_is_where_the_operator_and_the_clients_expect_it(job, replicas):
    server = dict(
        line.split(maxsplit=1)
        for line in (DEPLOY / "sshd_config").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert server["Port"] == "2222"
    assert "Port 2222" in (DEPLOY / "ssh_config").read_text()
    assert container(replicas)["readinessProbe"]["tcpSocket"]["port"] == 2222
    assert server["HostKey"] == job["spec"]["sshAuthMountPath"] + "/id_rsa"
    assert server["PasswordAuthentication"] == "no"
    configuration = container(replicas)["args"][-1]
    assert f"COPY sshd_config {configuration}" in (DEPLOY / "Dockerfile").read_text()
