"""Model builders; `build_model()` is the network of Horovod's model-parallelism example.

Each returns a plain Keras model and takes no argument that must be given.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

__all__ = ["build_model"]

DEVICES = ("/device:GPU:0", "/device:GPU:1")


def build_model(*, devices: Sequence[str] = DEVICES, seed: int | None = None) -> keras.Model:
    """The MNIST network: a conv block under one `tf.device` scope, a dense block under another.

    By itself this is the usual idiom, which places the variables and leaves the work on device 0;
    `tf_mp.parallelize(tf_mp.build_model)` reads the two scopes and moves the work too.

    Args:
        devices: One device for each block. On a machine that lacks them TensorFlow uses another
            without a word, and `parallelize` still sees two scopes.
        seed: Seed of the dropout and of the initial weights, or None for random ones.

    Returns:
        A model from images (batch, 28, 28, 1) float32 in [0, 1] to logits (batch, 10) float32.

    >>> build_model().output_shape
    (None, 10)
    """
    seeds = [None if seed is None else seed + i for i in range(5)]
    initials = [keras.initializers.GlorotUniform(s) for s in seeds]
    images = keras.Input((28, 28, 1), name="image")
    conv = {"kernel_size": 5, "padding": "same", "activation": "relu"}
    with tf.device(devices[0]):
        x = keras.layers.Conv2D(32, name="conv1", kernel_initializer=initials[0], **conv)(images)
        x = keras.layers.MaxPooling2D(2, name="pool1")(x)
        x = keras.layers.Conv2D(64, name="conv2", kernel_initializer=initials[1], **conv)(x)
        x = keras.layers.MaxPooling2D(2, name="pool2")(x)
        x = keras.layers.Flatten(name="flatten")(x)
    with tf.device(devices[1]):
        x = keras.layers.Dense(
            1024, activation="relu", name="dense", kernel_initializer=initials[2]
        )(x)
        x = keras.layers.Dropout(0.5, name="dropout", seed=seeds[4])(x)
        logits = keras.layers.Dense(10, name="logits", kernel_initializer=initials[3])(x)
    return keras.Model(images, logits, name="mnist_cnn")
