"""The networks that are measured, with made-up data: the same shapes for every framework."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tf_mp  # noqa: F401 - before keras: TensorFlow reads the oneDNN switch once

# isort: split
import keras
import numpy as np
import tensorflow as tf

from tf_mp import models

__all__ = ["NAMES", "Network", "balance_by_parameters", "endless", "network"]

MLP_LAYERS, MLP_WIDTH = 12, 1024
TRANSFORMER = {"vocabulary": 256, "length": 64, "width": 256, "num_blocks": 6}


@dataclasses.dataclass
class Network:
    """A model to be built, one batch for it, and where its two halves meet."""

    build: Callable[..., keras.Model]
    x: Any
    y: Any
    cuts: Any

    @property
    def batch(self):
        """Samples."""
        return len(self.x)


def mlp():
    """Twelve dense layers of one width: two halves that weigh the same."""
    x = inputs = keras.Input((MLP_WIDTH,))
    for _ in range(MLP_LAYERS):
        x = keras.layers.Dense(MLP_WIDTH, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x), name="mlp")


def network(name, batch=None):
    """A network of this name; `batch` replaces its usual number of samples."""
    random = np.random.default_rng(0)
    if name == "mnist_cnn":
        batch = batch or 100
        images = random.random((batch, 28, 28, 1), np.float32)
        return Network(models.build_model, images, random.integers(0, 10, batch), "scopes")
    if name == "mlp":
        batch = batch or 512
        x = random.standard_normal((batch, MLP_WIDTH), np.float32)
        # the input and six layers : six layers and the last
        return Network(mlp, x, random.integers(0, 10, batch), [6, 7])
    if name == "transformer":
        batch = batch or 32
        tokens = random.integers(1, 256, (batch, TRANSFORMER["length"])).astype("int32")
        build = lambda: models.transformer(dropout=0.0, **TRANSFORMER)  # noqa: E731
        return Network(build, tokens, np.roll(tokens, 1, 1), ["block3_norm1"])
    if name == "resnet50":
        batch = batch or 32
        images = random.random((batch, 64, 64, 3), np.float32)
        return Network(models.resnet50, images, random.integers(0, 10, batch), "auto")
    if name == "vgg16":
        batch = batch or 16
        images = random.random((batch, 64, 64, 3), np.float32)
        return Network(models.vgg16, images, random.integers(0, 10, batch), "auto")
    raise ValueError(f"Received network {name!r}. Expected one of {', '.join(NAMES)}.")


def endless(batch):
    """One batch, again and again.

    Without tf.data's autotuning: when an iterator ends, TensorFlow 2.21 often waits until its
    thread wakes by itself, after up to as long as the iterator has lived.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)


def balance_by_parameters(model):
    """Two stages whose numbers of parameters are as equal as cuts between operations allow."""
    from tf_mp import graph

    sizes = [
        sum(v.shape.num_elements() for v in operation.variables)
        for operation in graph.trace(model).operations
    ]
    cut = min(range(1, len(sizes)), key=lambda k: max(sum(sizes[:k]), sum(sizes[k:])))
    return [cut, len(sizes) - cut]


NAMES = ("mnist_cnn", "mlp", "transformer", "resnet50")
