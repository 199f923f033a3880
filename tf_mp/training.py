"""What a training script needs around `fit`: rate, resume, agreement between ranks, summary."""

import hashlib
import json
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tf_mp
from tf_mp import stop, world
from tf_mp.checkpoint import Checkpoints

__all__ = [
    "OPTIMIZERS", "agree_at_start", "broadcast", "digest_of_weights", "fit", "learning_rate",
    "plan", "replicate", "report", "resume", "verify", "versions",
]

#: What `--optimizer` accepts by name.
OPTIMIZERS = {
    "rmsprop": keras.optimizers.RMSprop,
    "adam": keras.optimizers.Adam,
    "sgd": keras.optimizers.SGD,
}


def plan(batch_size: int, stages: int, micro_batches: int | None = None) -> dict[str, int]:
    """What a run of the present ranks keeps for good, whatever ranks it has later.

    Args:
        batch_size: samples a rank.
        stages: devices of a rank.
        micro_batches: parts of a local batch; None: 2 x stages, 1 for one stage.
    """
    size = world.current().size
    micro_batches = micro_batches or (2 * stages if stages > 1 else 1)
    return {
        "global_batch": batch_size * size,
        "global_micro_batches": min(micro_batches, batch_size) * size,
    }


def fit(model: keras.Model, data: Any, callbacks: list[keras.callbacks.Callback]) -> None:
    """`model.fit`, after which no callback listens to signals, however it ended.

    Keras tells callbacks of the end of the training only where it was no error.
    """
    try:
        model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)
    finally:
        for callback in callbacks:
            if isinstance(callback, stop.AgreedStop):
                callback.on_train_end()


def learning_rate(global_batch: int, warmup_steps: int = 0) -> Any:
    """0.001 for each 100 samples of a step, reached in a straight line from the first step on.

    The rate follows from the global batch and the optimizer's own step count, so a run that is
    resumed, or that has other ranks, keeps it.
    """
    rate = 0.001 * global_batch / 100
    if warmup_steps == 0:
        return rate
    return keras.optimizers.schedules.PolynomialDecay(rate / warmup_steps, warmup_steps, rate)


def replicate(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer with gradients averaged over the ranks; itself in a world of one."""
    if world.current().size == 1:
        return optimizer
    from tf_mp import hvd

    return hvd.DistributedOptimizer(optimizer)


def broadcast() -> keras.callbacks.Callback:
    """The callback that gives every rank the root's weights; an idle one in a world of one."""
    if world.current().size == 1:
        return keras.callbacks.Callback()
    from tf_mp import hvd

    return hvd.callbacks.BroadcastGlobalVariablesCallback(0)


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    import tensorflow as tf

    found = {"python": platform.python_version(), "tf_mp": tf_mp.__version__}
    found |= {"tensorflow": tf.__version__, "keras": keras.__version__}
    try:
        return found | {"horovod": metadata.version("horovod")}
    except metadata.PackageNotFoundError:
        return found | {"horovod": "not installed"}


def agree_at_start(configuration: dict[str, Any]) -> None:
    """Checks on every rank that all run the same versions with the same settings.

    Args:
        configuration: settings by name. Of a folder or file (`..._dir`, `summary`), which each
            host may have elsewhere, only whether it is given counts.

    Raises:
        ValueError: on every rank, naming what differs and where; or the summary has no place.
    """
    world.agree("versions", versions())
    _make_room(configuration.get("summary"))
    places = {name for name in configuration if name.endswith("_dir") or name == "summary"}
    world.agree(
        "settings", {k: v is not None if k in places else v for k, v in configuration.items()}
    )


def _make_room(file: str | None) -> None:
    """Makes the folder of a file on the root rank, before hours of training and not after."""
    problem = None
    if file is not None and world.current().is_root:
        try:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = error.strerror
    problem = world.broadcast(problem, what="the place of the summary")
    if problem:
        raise ValueError(f"Received: --summary {file} ({problem}). Expected: a file in a folder.")


def resume(
    model: keras.Model, checkpoints: Checkpoints, configuration: dict[str, Any]
) -> int:
    """Puts the newest checkpoint into the model and returns the steps that it had made.

    Args:
        model: compiled.
        checkpoints: where to look.
        configuration: what must be as it was, or the run would not be the same run.

    Raises:
        ValueError: the checkpoint is of another run, on every rank.
    """
    state = checkpoints.restore(model)
    if state is None:
        return 0
    former = state["configuration"] if isinstance(state["configuration"], dict) else {}
    changed = [f"{k}={v!r} after {former[k]!r}" for k, v in configuration.items()
               if k in former and former[k] != v]
    if changed:
        raise ValueError(
            f"Received: {', '.join(changed)}. Expected: what the checkpoints in "
            f"{checkpoints.folder} were made with. Give the former values, or another folder."
        )
    world.say(f"going on from step {state['step']} of {checkpoints.folder}.")
    return int(state["step"])


def digest_of_weights(model: keras.Model) -> str:
    """The SHA-256 of all variables of a model, the same on every rank or an error on every rank.

    Raises:
        ValueError: ranks hold different weights; they did not train in step.
    """
    digest = hashlib.sha256()
    for variable in model.variables:
        digest.update(np.ascontiguousarray(variable.numpy()).tobytes())
    world.agree("weights after the training (weights_sha256)", digest.hexdigest())
    return digest.hexdigest()


def verify(model: keras.Model, data: Any) -> None:
    """Proves on the first batch that each operation runs on its stage's device; says so.

    Raises:
        RuntimeError: an operation strays, on any rank; raised on every rank.
    """
    from tf_mp import placement

    proof = placement.verify_placement(model, next(iter(data)))
    proved = world.exchange(proof.ok, what="whether placement is proved")
    proof.raise_for_strays()
    if not all(proved):
        others = [rank for rank, ok in enumerate(proved) if not ok]
        raise RuntimeError(f"Placement is not proved on ranks {others}; they name the strays.")
    world.say(f"placement proved: {sum(proof.counts.values())} operations, none strays.")


def timeline(model: keras.Model, data: Any, folder: str | Path) -> None:
    """Measures some steps on the first batch; each rank writes what they show into a folder."""
    from tf_mp import trace

    trace.record(model, next(iter(data)), folder)
    world.say(f"wrote timeline-rank<r>.png, .json and .trace.json into {folder}")


def report(summary: dict[str, Any], path: str | Path | None = None) -> None:
    """Prints the results of a run as a table, and writes them as JSON; on the root rank.

    Args:
        summary: results by name; a number that is not one becomes null in the file.
        path: the file, or None.
    """
    if not world.current().is_root:
        return
    clean = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in summary.items()}
    for name, value in clean.items():
        print(f"  {name:<18} {_words(value)}")
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(clean, indent=1) + "\n")


def _words(value: Any) -> str:
    """One cell of the table."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
