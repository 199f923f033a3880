"""The parts depend on each other one way, and each foreign library has its one door."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tf_mp"
FILES = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}


def imported(path):
    """The modules that a file imports anywhere, by their dotted names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def users(pattern):
    """The files that import something whose dotted name matches."""
    return {n for n, p in FILES.items() if any(re.match(pattern, m) for m in imported(p))}


def uses_tf_config(path):
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "config"
        and isinstance(node.value, ast.Name)
        and node.value.id in ("tf", "tensorflow")
        for node in ast.walk(ast.parse(path.read_text()))
    )


def test_horovod_is_imported_by_world_and_hvd_only():
    assert {n for n in users(r"horovod\b") if not n.startswith("hvd/")} == {"world.py"}


def test_tf_config_is_used_by_devices_only():
    assert {name for name, path in FILES.items() if uses_tf_config(path)} == {"devices.py"}


def test_private_names_are_imported_by_compat_only():
    assert users(r"(tensorflow\.python|keras\.src)\b") <= {"compat.py"}


def test_the_plan_needs_neither_tensorflow_nor_horovod():
    pure = {"partition.py", "schedule.py", "microbatch.py"}
    assert pure <= set(FILES)
    assert not pure & users(r"(tensorflow|keras|horovod|numpy)\b")


def test_hvd_depends_on_world_and_compat_only():
    inner = {n for n in FILES if n.startswith("hvd/")}
    assert inner
    for name in inner:
        ours = {m.split(".")[1] for m in imported(FILES[name]) if m.startswith("tf_mp.")}
        assert ours <= {"world", "compat", "hvd"}, name


def test_no_lower_part_imports_an_upper_one():
    order = [
        {"world", "cores", "gpus", "stop", "devices", "compat"},
        {"data", "models", "graph", "cost", "partition", "schedule", "microbatch"},
        {"stage", "update", "hvd"},
        {"pipeline"},
        {"checkpoint", "placement", "timeline"},
        {"report"},
        {"cli"},
    ]
    level = {name: height for height, names in enumerate(order) for name in names}
    for file, path in FILES.items():
        mine = level.get(file.partition("/")[0].removesuffix(".py"), len(order))
        for module in imported(path):
            other = level.get(".".join(module.split(".")[1:2]), 0)
            if module.startswith("tf_mp.") and file != "__init__.py":
                assert other <= mine, f"{file} imports {module}"
