"""What the set-up installs is pinned, explained and the same in every file that says it."""

import configparser
import importlib.util
import pathlib
import re
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXTRAS = ["cpu", "gpu", "mpi", "horovod", "data", "logs", "plots", "build", "compile", "test"]


def load(name):
    path = ROOT / "scripts" / "bootstrap" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project_name(requirement):
    return re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")


@pytest.fixture(scope="module")
def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_every_requirement_has_one_exact_version(pins):
    requirements = load("requirements").read_requirements(EXTRAS)
    assert not {project_name(each) for each in requirements} - set(pins)


def test_exact_versions_in_setup_cfg_are_those_of_the_constraints(pins):
    for requirement in load("requirements").read_requirements(EXTRAS):
        name, _, version = requirement.partition("==")
        if version:
            pattern = re.escape(version).replace(r"\*", r"[0-9]+")
            assert re.fullmatch(pattern, pins[project_name(name)]), requirement


def test_every_requirement_has_a_reason_on_the_line_before():
    text = (ROOT / "setup.cfg").read_text().splitlines()
    unexplained = []
    for requirement in load("requirements").read_requirements(EXTRAS):
        before = text[text.index(f"    {requirement}") - 1].strip()
        unexplained += [] if before.startswith("# ") else [requirement]
    assert not unexplained


def test_tensorflow_and_horovod_are_extras_only():
    names = {project_name(each) for each in load("requirements").read_requirements([])}
    assert not names & {"tensorflow", "tensorflow-cpu", "horovod", "keras"}


def test_an_extra_that_does_not_exist_is_named():
    with pytest.raises(SystemExit, match="Received extra 'tpu'"):
        load("requirements").read_requirements(["tpu"])


def test_the_set_up_takes_the_pythons_that_the_package_takes():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    assert config["options"]["python_requires"] == ">=3.11,<3.14"
    script = (ROOT / "scripts" / "bootstrap" / "venv.sh").read_text()
    assert re.search(r"^SUPPORTED='(.*)'", script, re.MULTILINE)[1] == "3.11 3.12 3.13"


def test_horovods_source_is_the_version_of_the_constraints(pins):
    script = (ROOT / "scripts" / "bootstrap" / "horovod.sh").read_text()
    assert re.search(r"^HOROVOD=(.*)$", script, re.MULTILINE)[1] == pins["horovod"]


def write_source(folder, corrections):
    for name, old, _ in corrections:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before\n{old}\nafter\n")


def test_the_correction_of_horovod_replaces_each_text(tmp_path):
    patch = load("patch_horovod")
    write_source(tmp_path, patch.CORRECTIONS)
    patch.correct(tmp_path)
    cmake = (tmp_path / "horovod/tensorflow/CMakeLists.txt").read_text()
    operations = (tmp_path / "horovod/tensorflow/mpi_ops.cc").read_text()
    assert "xla_mpi_ops.cc" not in cmake and "after" in cmake
    assert 'INSTALL_RPATH\n    "\\$ORIGIN/../../../..;' in cmake
    assert operations.count("AsGpuStreamValue(Stream* stream) {") == 1


def test_the_correction_of_another_horovod_is_refused(tmp_path):
    patch = load("patch_horovod")
    write_source(tmp_path, patch.CORRECTIONS)
    patch.correct(tmp_path)
    with pytest.raises(SystemExit, match="is this Horovod 0.28.1"):
        patch.correct(tmp_path)


def test_the_compiled_horovod_finds_open_mpi_in_whatever_environment_it_is():
    if not (pathlib.Path(sys.prefix) / ".tf_mp" / "horovod.done").exists():
        pytest.skip("this Horovod was not installed by `make setup`")
    (library,) = pathlib.Path(sysconfig.get_path("platlib")).glob("horovod/tensorflow/mpi_lib*.so")
    assert b"$ORIGIN/../../../..:" in library.read_bytes()
