"""The model zoo at a size for tests, with data and losses for each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tf_mp import models


@dataclasses.dataclass
class Case:
    build: Callable[[], keras.Model]
    x: Any
    y: Any
    losses: list[Any]
    sample_weight: Any = None
    loss_weights: list[float] | None = None

    def compiled_loss(self, model):
        return self.losses[0] if len(self.losses) == 1 else dict(zip(model.output, self.losses))


def _sparse(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def residual():
    """What ResNet-50 is made of, eight blocks small: convolutions, batch normalisation, sums."""
    x = inputs = keras.Input((32, 32, 3))
    for i in range(8):
        width = 4 * (1 + i // 4)
        y = keras.layers.Conv2D(width, 3, strides=1 + (i % 4 == 0), padding="same")(x)
        y = keras.layers.ReLU()(keras.layers.BatchNormalization()(y))
        y = keras.layers.Conv2D(width, 1)(y)
        x = y if i % 4 == 0 else keras.layers.Add()([x, y])
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def case(name, batch=10):
    random = np.random.default_rng(7)
    images = random.random((batch, 28, 28, 1), np.float32)
    colours = random.random((batch, 32, 32, 3), np.float32)
    labels = random.integers(0, 10, batch)
    tokens = random.integers(1, 64, (batch, 12)).astype("int32")
    for row, length in enumerate(random.integers(3, 12, batch)):
        tokens[row, length:] = 0
    if name == "mnist_cnn":
        return Case(lambda: models.build_model(seed=3), images, labels, [_sparse()])
    if name == "residual":
        return Case(residual, colours, labels, [_sparse()])
    if name == "resnet50":
        # At 32 x 32 its last maps have one place: batch normalisation of two samples would then
        # give +1 and -1 whatever they are, and gradients that are rounding and nothing else.
        large = random.random((batch, 64, 64, 3), np.float32)
        return Case(lambda: models.resnet50(size=64), large, labels, [_sparse()])
    if name == "vgg16":
        return Case(lambda: models.vgg16(size=32), colours, labels, [_sparse()])
    if name == "transformer":
        return Case(
            lambda: models.transformer(vocabulary=64, length=12, width=16, num_blocks=2), tokens,
            np.roll(tokens, 1, 1), [_sparse()],
        )  # fmt: skip
    if name == "lstm":
        build = lambda: models.lstm(width=8, length=12)  # noqa: E731
        return Case(build, tokens, labels % 4, [_sparse()])
    if name == "unet":
        return Case(
            lambda: models.unet(width=4, depth=2), colours,
            random.integers(0, 3, (batch, 32, 32)), [_sparse()],
        )  # fmt: skip
    assert name == "two_in_two_out"
    x = {
        "left": random.random((batch, 8), np.float32),
        "right": random.random((batch, 6), np.float32),
    }
    y = {"early": random.random((batch, 1), np.float32), "late": labels % 3}
    losses = [keras.losses.MeanSquaredError(), _sparse()]
    return Case(models.two_in_two_out, x, y, losses, loss_weights=[0.3, 0.7])
