"""Checkpoints of the plain model: written whole or not at all, by the root rank only.

A checkpoint is a folder `step-00000600` with `model.keras`, which plain Keras opens, and
`state.json`: the step, the random state, the configuration and a digest of the model file. It
knows no stages and no ranks. It is written beside, flushed to the disk and renamed in one go, so
a kill at any moment leaves the last one whole.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from tf_mp import state_file, world

__all__ = ["CheckpointCallback", "Checkpoints", "state_of"]

_MODEL, _STATE = "model.keras", "state.json"


class Checkpoints:
    """The checkpoints of one run in one folder. Every rank calls every method, at the same time.

    Args:
        folder: where they lie; only the root rank reads and writes there. None: nothing is saved.
        keep: how many of the newest ones stay. The best one, by `score`, stays too.
    """

    def __init__(self, folder: str | Path | None, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"Received: {keep=}. Expected: at least 1 checkpoint to keep.")
        self.folder = None if folder is None else Path(folder)
        self._keep = keep

    def save(
        self, model: keras.Model, step: int, *, configuration: Any = None, score: float = 0.0
    ) -> None:
        """Writes one checkpoint on the root rank; the others wait for it.

        Args:
            model: any Keras model, split or not, with its optimizer.
            step: how many optimizer steps it has made.
            configuration: what the run was started with, as JSON can hold it.
            score: the lowest score is the best.

        Raises:
            OSError: the root could not write, on every rank; earlier checkpoints are untouched.
        """
        if self.folder is None:
            return
        problem = None
        if world.current().size > 1:
            from tf_mp import hvd

            hvd.average_state(model)
        if world.current().is_root:
            try:
                self._write(model, step, configuration=configuration, score=score)
            except OSError as error:
                problem = f"{error.strerror or error}"
        problem = world.broadcast(problem, what="the end of a save")
        if problem:
            raise OSError(
                f"Received: {problem}, while writing the checkpoint of step {step} into "
                f"{self.folder}. Expected: a folder with room. Earlier checkpoints are untouched."
            )

    def restore(self, model: keras.Model) -> dict[str, Any] | None:
        """Puts the newest whole checkpoint into a model, on every rank.

        Args:
            model: compiled, with the layers of the saved one, split in any way.

        Returns:
            What `state.json` holds, or None where there is no checkpoint.

        Raises:
            ValueError: the checkpoint belongs to another model, on every rank.
        """
        state, problem = None, None
        if world.current().is_root:
            found = next(self._whole(), None)
            if found is not None:
                path, state = found
                problem = _load(model, path, state)
        state, problem = world.broadcast([state, problem], what="the restored checkpoint")
        if problem:
            raise ValueError(problem)
        if state is not None and world.current().size > 1:
            from tf_mp import hvd

            hvd.broadcast_variables(state_of(model), root_rank=0)
        return state

    def configuration(self) -> dict[str, Any]:
        """What the newest whole checkpoint was made with, on every rank; empty without one."""
        found = next(self._whole(), None) if world.current().is_root else None
        made_with = found[1].get("configuration") if found is not None else None
        made_with = world.broadcast(made_with, what="the checkpoint's configuration")
        return made_with if isinstance(made_with, dict) else {}

    def _whole(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yields the checkpoints that are whole, newest first; says which are not."""
        found = self.folder.glob("step-*") if self.folder is not None else []
        for path in sorted(found, reverse=True):
            try:
                state = state_file.read(path / _STATE)
                if state["model_sha256"] != _digest(path / _MODEL):
                    raise ValueError(f"{_MODEL} is not the file that was written")
                yield path, state
            except (OSError, ValueError, KeyError, TypeError) as error:
                world.say(f"skipping the damaged checkpoint {path}: {error}.")

    def _write(
        self, model: keras.Model, step: int, *, configuration: Any, score: float
    ) -> None:
        """Writes beside, flushes, renames, and removes what is not kept."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*-step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        final = self.folder / f"step-{step:08d}"
        beside = self.folder / f".new-{final.name}"
        try:
            beside.mkdir()
            model.save(beside / _MODEL)
            state = _describe(model, step) | {
                "score": score,
                "configuration": configuration,
                "model_sha256": _digest(beside / _MODEL),
            }
            (beside / _STATE).write_text(json.dumps(state, indent=1))
            for path in (beside / _MODEL, beside / _STATE, beside):
                _flush(path)
            self._remove(final)
            beside.rename(final)
            _flush(self.folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        """Removes all but the newest ones and the best one."""
        whole = list(self._whole())
        best = min(whole, key=lambda pair: pair[1]["score"], default=None)
        for pair in whole[self._keep :]:
            if pair is not best:
                self._remove(pair[0])

    def _remove(self, path: Path) -> None:
        """Removes one checkpoint so that a kill never leaves half of it under its name."""
        if path.exists():
            away = path.with_name(f".old-{path.name}")
            path.rename(away)
            shutil.rmtree(away, ignore_errors=True)


class CheckpointCallback(keras.callbacks.Callback):
    """Saves a checkpoint every few steps and at the end of `fit`; stands in every rank's list.

    Args:
        checkpoints: where to save.
        every: steps from one to the next.
        first_step: the steps made before this `fit`, as after a resume.
        configuration: kept in each checkpoint.
        monitor: the entry of Keras's logs whose lowest value is the best.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | str | Path | None,
        every: int = 100,
        *,
        first_step: int = 0,
        configuration: Any = None,
        monitor: str = "loss",
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"Received: {every=}. Expected: at least 1 step.")
        if not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints)
        self._checkpoints = checkpoints
        self._every = every
        self._configuration = configuration
        self._monitor = monitor
        self._step = self._saved = first_step
        self._score = 0.0

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Counts the step, so that callbacks before this one may ask for it to be saved."""
        self._step += 1

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Saves when its turn has come."""
        self._score = float((logs or {}).get(self._monitor, 0.0))
        if self._step % self._every == 0:
            self.save()

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Saves the last step."""
        self.save()

    def save(self) -> None:
        """Saves now, on every rank, unless this step is saved already."""
        if self._step > self._saved:
            self._checkpoints.save(
                self.model, self._step, configuration=self._configuration, score=self._score
            )
            self._saved = self._step


def _describe(model: keras.Model, step: int) -> dict[str, Any]:
    """What a model file does not hold: the step, the random state, the versions, the shapes."""
    import tensorflow as tf

    return {
        "step": step,
        "seeds": [state.numpy().tolist() for state in _seed_states(model)],
        "shapes": _shapes(model),
        "optimizer": _optimizer(model),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }


def _shapes(model: keras.Model) -> list[list[int]]:
    """The shapes of all variables, in the model's order: how another model is noticed."""
    return [list(variable.shape) for variable in model.variables]


def _optimizer(model: keras.Model) -> str | None:
    """The name of the optimizer's class: many keep variables of the same shapes."""
    optimizer = getattr(model, "optimizer", None)
    return None if optimizer is None else type(optimizer).__name__


def _seed_states(model: keras.Model) -> list[Any]:
    """The states of the model's random generators, which Keras leaves out of its files."""
    return [v for v in model.non_trainable_variables if v.path.endswith("seed_generator_state")]


def _load(model: keras.Model, path: Path, state: dict[str, Any]) -> str | None:
    """Loads weights, optimizer and random state; returns what was wrong, in words, or None."""
    wanted, seeds = _shapes(model), _seed_states(model)
    if state["shapes"] != wanted or len(state["seeds"]) != len(seeds):
        return (
            f"Received: the checkpoint {path} of another model ({len(state['shapes'])} variables, "
            f"shapes {state['shapes'][:3]}...). Expected: {len(wanted)} variables, shapes "
            f"{wanted[:3]}.... Choose another folder for this model's checkpoints."
        )
    if state["optimizer"] != _optimizer(model):
        return (
            f"Received: the checkpoint {path} of a run with {state['optimizer']}. Expected: "
            f"{_optimizer(model)}, this run's optimizer."
        )
    if getattr(model, "optimizer", None) is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Keras only warns where an optimizer does not fit
            model.load_weights(path / _MODEL)
            for variable, seed in zip(seeds, state["seeds"], strict=True):
                variable.assign(seed)
    except (ValueError, TypeError, OverflowError, UserWarning) as error:
        return f"Received: the checkpoint {path}, which does not fit this model: {error}"
    return None


def state_of(model: keras.Model) -> list[keras.Variable]:
    """All variables that a run goes on from: the model's and its optimizer's, which is built."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*model.variables, *(optimizer.variables if optimizer is not None else [])]


def _digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
