"""Evaluation and prediction of a split model, and what training shares with them."""

from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, microbatch, world
from tf_mp.engine import Batch, Engine
from tf_mp.pipeline import Pipeline

__all__ = ["engine_of", "outputs", "penalty", "predict", "test"]


def test(pipeline: Pipeline, model: keras.Model, data: Any) -> dict[str, Any]:
    """Loss and metrics of a local batch; returns Keras's logs."""
    x, y, sample_weight = compat.unpack(data)
    engine, y_pred = _infer(pipeline, x)
    last = pipeline.stages[-1]
    with engine.place(last, "metrics"):
        total = _whole_loss(model, pipeline, y, y_pred, sample_weight)
        total = _plus(total, _mean_added(engine))
        for stage in pipeline.stages:
            total = _plus(total, penalty(pipeline, engine, stage))
        if total is None:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        model._loss_tracker.update_state(total, sample_weight=engine.batch.size)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def predict(pipeline: Pipeline, model: keras.Model, data: Any) -> Any:
    """The model's outputs for a local batch, in its own structure, (local_batch, ...) each."""
    x, _, _ = compat.unpack(data)
    return _infer(pipeline, x)[1]


def engine_of(pipeline: Pipeline, x: Any, step: tf.Tensor) -> Engine:
    """The engine for one local batch at a global step (scalar int64)."""
    batch = Batch(pipeline.standardize(x), pipeline.micro_batches)
    first = pipeline.first_micro_batch
    if first is None:
        first = world.current().rank * pipeline.micro_batches
    return Engine(
        pipeline.stages,
        batch,
        input_keys=pipeline.graph.inputs,
        homes=pipeline.homes,
        step=step,
        device_of=pipeline.device_of,
        first_micro_batch=first,
    )


def _infer(pipeline: Pipeline, x: Any) -> tuple[Engine, Any]:
    engine = engine_of(pipeline, x, tf.constant(0, tf.int64))
    for i in range(len(engine.batch.sizes)):
        for stage in pipeline.stages:
            engine.forward(stage.index, i, training=False, watch=None)
    return engine, outputs(pipeline, engine)


def outputs(pipeline: Pipeline, engine: Engine) -> Any:
    """The model's outputs over the local batch, each on the device of its stage."""
    joined = []
    for key in pipeline.graph.outputs:
        stage = pipeline.stages[pipeline.home_of(key)]
        with engine.place(stage, "metrics"):
            tensor, mask = engine.joined(key)
            if mask is not None:
                tensor = tf.identity(tensor)
                compat.set_mask(tensor, mask)
            joined.append(tensor)
    return keras.tree.pack_sequence_as(pipeline.structure, joined)


def _whole_loss(model: Any, pipeline: Pipeline, y: Any, y_pred: Any, weight: Any) -> Any:
    """The compiled loss of the local batch as Keras computes it, without penalties."""
    return None if model._compile_loss is None else model._compile_loss(y, y_pred, weight)


def _plus(total: Any, part: Any) -> Any:
    if total is None or part is None:
        return part if total is None else total
    return total + tf.cast(part, total.dtype)


def _mean_added(engine: Engine) -> Any:
    """What `add_loss` gave, weighted by the samples of each micro-batch, or None."""
    shares = microbatch.shares(engine.batch.sizes)
    parts = [m.loss * shares[i] for (_, i), m in engine.made.items() if m.loss is not None]
    return tf.add_n([tf.identity(part) for part in parts]) if parts else None


def penalty(pipeline: Pipeline, engine: Engine, stage: Any) -> Any:
    """The sum of the weight regularisers of the variables that live in a stage, or None."""
    parts = [
        tf.reduce_sum(tf.cast(variable.regularizer(value), keras.config.floatx()))
        for variable, value in zip(stage.weights, engine.read[stage.index][0], strict=True)
        if variable.regularizer is not None and pipeline.homes[id(variable)] == stage.index
    ]
    return tf.add_n(parts) if parts else None
