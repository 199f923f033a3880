"""Model builders; `build_model()` is the network of Horovod's model-parallelism example.

Each returns a plain Keras model and takes no argument that must be given.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

__all__ = [
    "NAMES",
    "build_model",
    "lstm",
    "resnet50",
    "transformer",
    "two_in_two_out",
    "unet",
    "vgg16",
]

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


def resnet50(*, size: int = 64, num_classes: int = 10) -> keras.Model:
    """ResNet-50 (He et al. 2015) with batch normalisation, from `keras.applications`.

    Returns:
        A model from images (batch, size, size, 3) float32 to logits (batch, num_classes).
    """
    return keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=num_classes, classifier_activation=None
    )


def vgg16(*, size: int = 64, num_classes: int = 10) -> keras.Model:
    """VGG-16 (Simonyan and Zisserman 2014), from `keras.applications`.

    Returns:
        A model from images (batch, size, size, 3) float32 to logits (batch, num_classes).
    """
    return keras.applications.VGG16(
        weights=None, input_shape=(size, size, 3), classes=num_classes, classifier_activation=None
    )


def transformer(
    *,
    vocabulary: int = 256,
    length: int = 32,
    width: int = 128,
    num_blocks: int = 4,
    num_heads: int = 4,
    dropout: float = 0.1,
) -> keras.Model:
    """A pre-norm transformer encoder whose input and output share one embedding.

    The shared weights make it the test of a layer that is used in two stages.

    Returns:
        A model from tokens (batch, length) int32 to logits (batch, length, vocabulary).
    """
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    embedding = keras.layers.ReversibleEmbedding(vocabulary, width, name="embedding")
    x = embedding(tokens)
    for i in range(num_blocks):
        y = keras.layers.LayerNormalization(name=f"block{i}_norm1")(x)
        y = keras.layers.MultiHeadAttention(
            num_heads, width // num_heads, dropout=dropout, name=f"block{i}_attention"
        )(y, y)
        x = keras.layers.Add(name=f"block{i}_add1")([x, y])
        y = keras.layers.LayerNormalization(name=f"block{i}_norm2")(x)
        y = keras.layers.Dense(4 * width, activation="gelu", name=f"block{i}_dense1")(y)
        y = keras.layers.Dense(width, name=f"block{i}_dense2")(y)
        y = keras.layers.Dropout(dropout, name=f"block{i}_dropout")(y)
        x = keras.layers.Add(name=f"block{i}_add2")([x, y])
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, embedding(x, reverse=True), name="transformer")


def lstm(
    *, vocabulary: int = 64, length: int = 16, width: int = 32, num_classes: int = 4
) -> keras.Model:
    """Two LSTM layers over masked tokens; 0 is padding.

    Returns:
        A model from tokens (batch, length) int32 to logits (batch, num_classes).
    """
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(vocabulary, width, mask_zero=True, name="embedding")(tokens)
    x = keras.layers.LSTM(width, return_sequences=True, name="lstm1")(x)
    x = keras.layers.LSTM(width, name="lstm2")(x)
    x = keras.layers.Dropout(0.2, name="dropout")(x)
    return keras.Model(tokens, keras.layers.Dense(num_classes, name="logits")(x), name="lstm")


def unet(*, size: int = 32, width: int = 8, depth: int = 3, num_classes: int = 3) -> keras.Model:
    """A U-Net (Ronneberger et al. 2015): skip connections from the first stage to the last.

    Returns:
        A model from images (batch, size, size, 3) float32 to logits (batch, size, size, classes).
    """
    images = keras.Input((size, size, 3), name="image")
    conv = {"kernel_size": 3, "padding": "same", "activation": "relu"}
    x, skips = images, []
    for i in range(depth):
        x = keras.layers.Conv2D(width * 2**i, name=f"down{i}", **conv)(x)
        skips.append(x)
        x = keras.layers.MaxPooling2D(2, name=f"pool{i}")(x)
    x = keras.layers.Conv2D(width * 2**depth, name="bottom", **conv)(x)
    for i in reversed(range(depth)):
        x = keras.layers.UpSampling2D(2, name=f"up{i}")(x)
        x = keras.layers.Concatenate(name=f"skip{i}")([skips[i], x])
        x = keras.layers.Conv2D(width * 2**i, name=f"merge{i}", **conv)(x)
    return keras.Model(images, keras.layers.Conv2D(num_classes, 1, name="logits")(x), name="unet")


def two_in_two_out(*, width: int = 16) -> keras.Model:
    """Two inputs, two outputs, one of them early; a regulariser, an activity regulariser.

    Returns:
        A model from {"left": (batch, 8), "right": (batch, 6)} float32 to {"early": (batch, 1),
        "late": (batch, 3)}.
    """
    left, right = keras.Input((8,), name="left"), keras.Input((6,), name="right")
    x = keras.layers.Dense(width, activation="relu", name="left1", kernel_regularizer="l2")(left)
    early = keras.layers.Dense(1, name="early")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    y = keras.layers.Dense(width, name="right1", activity_regularizer="l2")(right)
    x = keras.layers.Concatenate(name="both")([x, y])
    x = keras.layers.Dense(width, activation="relu", name="both1", kernel_regularizer="l1")(x)
    late = keras.layers.Dense(3, name="late")(keras.layers.Dropout(0.3, name="dropout")(x))
    return keras.Model(
        {"left": left, "right": right}, {"early": early, "late": late}, name="two_in_two_out"
    )


#: What `--model` accepts by name.
NAMES = {
    "mnist_cnn": build_model,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "transformer": transformer,
    "lstm": lstm,
    "unet": unet,
    "two_in_two_out": two_in_two_out,
}
