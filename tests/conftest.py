"""Four logical CPU devices for every test: missing ones fail the whole run, they skip nothing."""

import os

# One order of every sum: results repeat bit by bit.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tf_mp  # noqa: E402

tf_mp.init(devices_per_rank=4)

import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

assert len(tf.config.list_logical_devices("CPU")) == 4, tf.config.list_logical_devices()


@pytest.fixture(autouse=True)
def fresh_keras(request):
    """Gives each test that uses Keras the same random numbers and the same names of layers."""
    if {"keras", "tf", "tf_mp", "reference"} & set(vars(request.module)):
        keras.utils.clear_session(free_memory=False)  # collecting garbage takes seconds
        keras.utils.set_random_seed(0)
