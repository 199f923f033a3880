"""The public list is short, loaded lazily, and every name on it explains itself."""

import subprocess
import sys

import pytest

import tf_mp

NAMES = [
    "CheckpointCallback",
    "Pipeline",
    "World",
    "build_model",
    "current_world",
    "init",
    "parallelize",
    "pipeline_of",
    "verify_placement",
]


def test_the_public_names_are_these():
    assert tf_mp.__all__ == NAMES
    assert set(NAMES) <= set(dir(tf_mp))


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring(name):
    assert getattr(tf_mp, name).__doc__


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match="no attribute 'paralelize'; it has .*parallelize"):
        getattr(tf_mp, "paralelize")  # noqa: B009


def test_importing_imports_no_tensorflow_and_turns_onednn_on():
    code = (
        "import os, sys, tf_mp, tf_mp.world, tf_mp.cores, tf_mp.gpus, tf_mp.devices\n"
        "assert not {'tensorflow', 'keras', 'horovod', 'numpy'} & set(sys.modules)\n"
        "assert os.environ['TF_ENABLE_ONEDNN_OPTS'] == sys.argv[1], os.environ\n"
    )
    for given, wanted in [({}, "1"), ({"TF_ENABLE_ONEDNN_OPTS": "0"}, "0")]:
        subprocess.run([sys.executable, "-c", code, wanted], env=given, check=True)
