"""What a person asks a sub-command for: a model by name, how to cut it, and a batch for it."""

import argparse
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "add_json_option",
    "add_model_options",
    "builder",
    "compile_if_needed",
    "cuts_of",
    "num_stages",
    "positive",
    "random_batch",
    "split",
    "usual_idiom",
]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all sub-commands about a model share."""
    add = parser.add_argument
    add(
        "--model",
        default="mnist_cnn",
        help="a built-in name (mnist_cnn, resnet50, ...), a .keras file, or "
        "package.module:function that builds a Keras model (default: %(default)s)",
    )
    add("--stages", type=positive, help="number of stages (default: what the cuts give)")
    add(
        "--cuts",
        help="'scopes' (the tf.device blocks of the model), 'auto' (measured), layer names that "
        "begin a stage ('dense,logits'), or operations for each stage ('4,3')",
    )
    add("--micro-batches", type=positive, help="micro-batches of a step (default: 2 x stages)")
    add("--schedule", default="1f1b", help="1f1b or gpipe (default: %(default)s)")
    add(
        "--batch-size", type=positive, default=32, help="samples of a rank (default: %(default)s)"
    )
    add_json_option(parser)
    add("--png", type=Path, metavar="FILE", help="also draw a picture into FILE")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`, which takes a file where a launcher mixes the output of the ranks."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print JSON and nothing else, or write it into FILE beside the tables",
    )


def builder(name: str) -> Callable[[], Any] | Any:
    """The function that builds a model, or a model that was saved.

    Args:
        name: a built-in name, a path of a `.keras` file, or `package.module:function`.

    Raises:
        ValueError: there is no such model; the message lists what there is.
    """
    if name.endswith((".keras", ".h5")):
        return _saved(Path(name))
    if ":" in name:
        return _imported(name)
    from tf_mp import models

    if name not in models.NAMES:
        raise ValueError(
            f"No model of that name. Received: --model {name}. Expected one of "
            f"{', '.join(sorted(models.NAMES))}, a .keras file, or package.module:function."
        )
    return models.NAMES[name]


def cuts_of(text: str | None) -> Any:
    """The `cuts` argument of `parallelize` from its text.

    >>> cuts_of("4,3"), cuts_of("dense"), cuts_of("auto")
    ([4, 3], ['dense'], 'auto')
    """
    if text in (None, "auto", "scopes"):
        return text
    words = [word.strip() for word in str(text).split(",")]
    if not all(words):
        raise ValueError(
            f"Received: --cuts {str(text)!r}. Expected: 'scopes', 'auto', layer names that begin "
            "a stage ('dense,logits'), or operations for each stage ('4,3')."
        )
    return [int(word) for word in words] if all(word.isdigit() for word in words) else words


def num_stages(options: argparse.Namespace) -> int | None:
    """The number of stages that the options ask for, None where the model's scopes tell."""
    cuts = cuts_of(options.cuts)
    if options.stages is not None or not isinstance(cuts, list):
        return options.stages
    return len(cuts) if isinstance(cuts[0], int) else len(cuts) + 1


def split(options: argparse.Namespace) -> Any:
    """The model that the options name, split as they say and compiled."""
    import tf_mp

    tf_mp.init(devices_per_rank=num_stages(options))
    model = tf_mp.parallelize(
        builder(options.model),
        cuts=cuts_of(options.cuts),
        stages=options.stages,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
    )
    compile_if_needed(model)
    return model


def usual_idiom(options: argparse.Namespace, pipeline: Any) -> tuple[Any, dict[str, int]]:
    """The same model as tutorials write it, compiled, and the stage of each of its layers.

    Args:
        options: the options that name the model.
        pipeline: how the split model is cut.
    """
    from tf_mp import idiom

    plain = builder(options.model)
    plain = plain if hasattr(plain, "layers") else plain()
    names = {layer.name for layer in plain.layers}
    stages: dict[str, int] = {}
    for stage in pipeline.stages:
        for operation in stage.operations:
            own = getattr(operation.target, "name", operation.name)
            name = own if own in names else operation.name.partition("/")[0]
            stages.setdefault(name, stage.index)
    devices = [stage.device for stage in pipeline.stages]
    written = idiom.write_usual_idiom(plain, stages, devices)
    compile_if_needed(written, alone=True)
    return written, {layer.name: stages.get(layer.name, 0) for layer in written.layers}


def compile_if_needed(model: Any, *, alone: bool = False) -> None:
    """Compiles a model that is not, with a loss that fits its outputs, to have a step to run.

    Args:
        model: a Keras model.
        alone: leave out the averaging over ranks.
    """
    import keras

    from tf_mp import world

    optimizer, loss = getattr(model, "optimizer", None), getattr(model, "loss", None)
    if not model.compiled:
        optimizer, losses = keras.optimizers.RMSprop(), [_loss(output) for output in model.outputs]
        loss = losses if len(losses) > 1 else losses[0]
    several = world.current().size > 1 and not alone
    if several and not hasattr(optimizer, "reduce_gradients"):
        from tf_mp import hvd

        optimizer = hvd.DistributedOptimizer(optimizer)
    if not model.compiled or optimizer is not model.optimizer:
        model.compile(optimizer, loss=loss)


def random_batch(model: Any, batch_size: int) -> tuple[Any, Any]:
    """Made-up inputs and targets for a split model: `(x, y)`, (batch_size, ...) each."""
    import keras

    from tf_mp import cost, pipeline

    graph = pipeline.pipeline_of(model).graph
    flat = cost.sample_of(graph, batch_size)
    inputs = keras.tree.pack_sequence_as(graph.function._inputs_struct, flat)
    outputs = model(keras.tree.map_structure(lambda tensor: tensor[:1], inputs))
    flat_outputs = keras.tree.flatten(outputs)
    draw = np.random.default_rng(0)
    targets = []
    for output, loss in zip(flat_outputs, _losses(model, outputs), strict=True):
        shape = (batch_size, *output.shape[1:])
        sparse = "sparse" in _loss_name(loss)
        target = draw.integers(0, shape[-1], shape[:-1]) if sparse else draw.random(shape)
        targets.append(target if sparse else target.astype("float32"))
    return inputs, keras.tree.pack_sequence_as(outputs, targets)


def _loss(output: Any) -> Any:
    import keras

    if len(output.shape) == 2 and (output.shape[-1] or 0) > 1:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.losses.MeanSquaredError()


def _losses(model: Any, outputs: Any) -> list[Any]:
    """The loss of each output, in Keras's flat order of them."""
    loss = model.loss
    if isinstance(loss, dict) and isinstance(outputs, dict):
        return [loss.get(name) for name in sorted(outputs)]
    if isinstance(loss, dict):
        return [loss.get(name) for name in model.output_names]
    return list(loss) if isinstance(loss, list | tuple) else [loss] * len(model.outputs)


def _loss_name(loss: Any) -> str:
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", loss)).lower()


def _saved(path: Path) -> Any:
    import keras

    if not path.is_file():
        raise ValueError(f"No such file. Received: --model {path}. Expected a saved Keras model.")
    try:
        return keras.models.load_model(path)
    except Exception as error:  # a damaged file fails in any part of Keras, zipfile or HDF5
        raise ValueError(
            f"Received: --model {path}, which Keras cannot load ({_brief(error)}). Expected: a "
            "whole model, saved with `model.save`, whose own classes are importable."
        ) from error


def _imported(name: str) -> Callable[[], Any]:
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except Exception as error:  # whatever that module raises while it is imported
        raise ValueError(
            f"The model cannot be imported: {_brief(error)}. Received: --model {name}. "
            "Expected package.module:function, importable from this folder."
        ) from error
    if not callable(found):
        raise ValueError(f"{name} is not a function. Received: {type(found).__name__}.")
    return _telling(name, found)


def _telling(name: str, build: Callable[[], Any]) -> Callable[[], Any]:
    """The function, whose errors say whose they are."""

    @functools.wraps(build)
    def built() -> Any:
        try:
            return build()
        except Exception as error:
            raise ValueError(
                f"Received: --model {name}, which raised {_brief(error)}. Expected: a function "
                "without arguments that returns a Keras model."
            ) from error

    return built


def _brief(error: Exception) -> str:
    """One line for an error, with its type unless its words are enough."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ImportError) else f"{type(error).__name__}: {text}"


def positive(text: str) -> int:
    """A whole number of at least 1, as `argparse` reads it."""
    value = int(text) if text.lstrip("-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return value
