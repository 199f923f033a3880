"""The training step of a split model: forwards and backwards by the schedule, reduce, update."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_mp import compat, microbatch, reducing, step, update, world
from tf_mp import loss as losses_of
from tf_mp.backward import Backward
from tf_mp.engine import Batch
from tf_mp.opnames import scope
from tf_mp.pipeline import Pipeline
from tf_mp.stage import gate

__all__ = ["train"]


def train(pipeline: Pipeline, model: keras.Model, data: Any) -> dict[str, Any]:
    """One optimizer step on a local batch; returns Keras's logs.

    Args:
        pipeline: The plan of the split model.
        model: The compiled model.
        data: `(x, y, sample_weight)` as Keras gives it; the batch dimension must be static.
    """
    return _Train(pipeline, model, data).run()


class _Train:
    """One training step."""

    def __init__(self, pipeline: Pipeline, model: keras.Model, data: Any) -> None:
        self.pipeline, self.model = pipeline, model
        self.x, self.y, self.sample_weight = compat.unpack(data)
        self.optimizer: Any = model.optimizer
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        with tf.device(pipeline.stages[0].device), tf.name_scope(scope(0, "forward") + "/"):
            number = tf.cast(compat.raw(inner._iterations).read_value(), tf.int64)
        self.engine = step.engine_of(pipeline, self.x, number)
        self.ranks = world.current().size
        self.losses = losses_of.resolve(
            model, pipeline.graph.function.outputs, pipeline.structure, self.y, self.sample_weight
        )
        self.keys = [pipeline.graph.outputs[entry.output] for entry in self.losses]

    def run(self) -> dict[str, Any]:
        pipeline, engine = self.pipeline, self.engine
        counts = self._denominators()
        scales, extra = self._scales(counts)
        wanted = [stage.wanted(pipeline.needs_gradient) for stage in pipeline.stages]
        backward = Backward(
            engine, self.losses, [pipeline.home_of(key) for key in self.keys], self.keys,
            scales, extra, wanted, pipeline.recompute,
        )  # fmt: skip
        self.added: list[Any] = []
        for action in pipeline.schedule_of(len(engine.batch.sizes)).total_order():
            k, i = action.stage, action.micro_batch
            if action.kind == "forward":
                engine.forward(
                    k, i, training=True, watch=None if pipeline.recompute[k] else wanted[k]
                )
                made = engine.made[k, i]
                self._keep_state(k, i, made)
            else:
                backward.run(k, i)
        y_pred = step.outputs(pipeline, engine)
        penalties = self._update(backward)
        self._merge_state()
        return self._logs(backward, counts, y_pred, penalties)

    # Denominators and scales ---------------------------------------------------------------

    def _denominators(self) -> list[list[Any]]:
        """For each loss what it divides by in each micro-batch of this rank."""
        function = self.pipeline.graph.function
        masked = [
            compat.get_mask(function.outputs[entry.output]) is not None
            or losses_of.has_loss_mask(entry.loss, entry.y_true, function.outputs[entry.output])
            for entry in self.losses
        ]
        masks = self._masks(masked) if any(masked) else [None] * len(masked)
        batch, found = self.engine.batch, []
        for entry, key, mask in zip(self.losses, self.keys, masks, strict=True):
            with self.engine.place(self.pipeline.stages[self.pipeline.home_of(key)], "loss"):
                found.append(losses_of.denominators(entry, batch.sizes, mask, batch.cut))
        return found

    def _masks(self, masked: Sequence[bool]) -> list[Any]:
        """The masks of the outputs over the local batch, before the first micro-batch.

        The forward is written down once more for the whole batch; TensorFlow keeps of it only
        what the masks need, which is next to nothing for masks made of the model's inputs.
        """
        whole = Batch(self.pipeline.standardize(self.x), 1)
        values: dict[int, Any] = {
            key: (parts[0], None)
            for key, parts in zip(self.pipeline.graph.inputs, whole.inputs, strict=True)
        }
        for stage in self.pipeline.stages:
            with self.engine.place(stage, "loss"):
                pairs = [values[key] for key in stage.inputs]
                weights, state, seeds = self.engine.read[stage.index]
                outputs, out_masks, *_ = stage._forward(
                    True, weights, state, seeds, [t for t, _ in pairs], [m for _, m in pairs],
                    self.engine.step, tf.constant(0, tf.int64), self.engine.token(stage),
                )  # fmt: skip
                made = zip(outputs, out_masks, strict=True)
                values.update(zip(stage.outputs, made, strict=True))
        found = []
        for entry, key, has_mask in zip(self.losses, self.keys, masked, strict=True):
            stage = self.pipeline.stages[self.pipeline.home_of(key)]
            with self.engine.place(stage, "loss"):
                found.append(losses_of.mask_of(entry, *values[key]) if has_mask else None)
        return found

    def _scales(self, counts: list[list[Any]]) -> tuple[list[list[Any]], list[Any]]:
        """The factor of each loss's gradient in each micro-batch, and of `add_loss`'s."""
        sizes = self.engine.batch.sizes
        with self.engine.place(self.pipeline.stages[-1], "loss"):
            locals_: list[Any] = [sum(row) if row[0] is not None else 1.0 for row in counts]
        totals = self._over_ranks([*locals_, float(sum(sizes))])
        with self.engine.place(self.pipeline.stages[-1], "loss"):
            loss_scale = self.optimizer.scale_loss(tf.ones([], losses_of.scale_dtype()))
            scales = [
                [
                    self._weight(count, total, entry.weight) * loss_scale
                    for count in row
                ]
                for row, total, entry in zip(counts, totals[:-1], self.losses, strict=True)
            ]  # fmt: skip
            extra = [self._weight(size, totals[-1], None) * loss_scale for size in sizes]
        self.loss_scale, self.num_samples = loss_scale, totals[-1]
        return scales, extra

    def _weight(self, count: Any, total: Any, loss_weight: Any) -> tf.Tensor:
        dtype = losses_of.scale_dtype()
        if count is None:
            share = tf.constant(microbatch.weight(None, total, self.ranks), dtype)
        else:
            numerator = tf.cast(count, dtype) * self.ranks
            share = tf.math.divide_no_nan(numerator, tf.cast(total, dtype))
        return share if loss_weight is None else share * loss_weight

    def _over_ranks(self, locals_: list[Any]) -> list[Any]:
        if self.ranks == 1:
            return locals_
        from tf_mp import hvd

        with self.engine.place(self.pipeline.stages[-1], "reduce"):
            packed = tf.stack([tf.cast(value, losses_of.scale_dtype()) for value in locals_])
            name = f"tf_mp/{self.pipeline.tag}/denominators"
            return tf.unstack(hvd.allreduce(packed, op=hvd.Sum, name=name), num=len(locals_))

    # State -----------------------------------------------------------------------------------

    def _keep_state(self, k: int, i: int, made: Any) -> None:
        self.states: dict[int, list[Any]] = getattr(self, "states", {})
        self.states.setdefault(k, []).append(made.state)
        if made.loss is not None:
            shares = microbatch.shares(self.engine.batch.sizes)
            with self.engine.place(self.pipeline.stages[k], "forward", i):
                self.added.append(made.loss * shares[i])

    def _merge_state(self) -> None:
        """Moves the state of each stage once, by what each micro-batch made of it."""
        shares = microbatch.shares(self.engine.batch.sizes)
        for stage in self.pipeline.stages:
            rows = self.states.get(stage.index, [])
            for position, j in enumerate(stage.changed or []):
                variable = stage.state[j]
                if self.pipeline.homes[id(variable)] != stage.index:
                    raise ValueError(_shared_state(variable))
                with self.engine.place(stage, "update"):
                    old = self.engine.read[stage.index][1][j]
                    news = [row[position] for row in rows]
                    if not old.dtype.is_floating:
                        new = news[0]
                    elif len(news) == 1:
                        new = news[0]
                    else:
                        new = _merged(old, news, shares)
                    new = self._mean_over_ranks(new, variable) if old.dtype.is_floating else new
                    compat.raw(variable).assign(new)

    def _mean_over_ranks(self, value: tf.Tensor, variable: keras.Variable) -> tf.Tensor:
        """The mean over the ranks, each by its share of the samples: shares may be unequal."""
        if self.ranks == 1:
            return value
        from tf_mp import hvd

        share = tf.cast(self.engine.batch.size / self.num_samples, value.dtype)
        name = f"tf_mp/{self.pipeline.tag}/state/{variable.path}"
        return hvd.allreduce(value * share, op=hvd.Sum, name=name)

    # Update ----------------------------------------------------------------------------------

    def _update(self, backward: Backward) -> list[Any]:
        """Reduces the gradients over ranks and steps; returns the penalties of the weights."""
        pipeline, engine = self.pipeline, self.engine
        by_variable: dict[int, list[Any]] = {}
        for stage in pipeline.stages:
            for j, gradient in zip(
                backward.present[stage.index] or [], backward.sums[stage.index], strict=True
            ):
                by_variable.setdefault(id(stage.weights[j]), []).append(gradient)
        shares, penalties = [], []
        for stage in pipeline.stages:
            own = [v for v in stage.weights if pipeline.homes[id(v)] == stage.index]
            with engine.place(stage, "backward"):
                gradients = [_sum(by_variable.get(id(v), [])) for v in own]
                penalty, extra = self._penalty_gradients(stage, own)
                pairs = zip(gradients, extra, strict=True)
                gradients = [_sum([g for g in pair if g is not None]) for pair in pairs]
            if penalty is not None:
                penalties.append(penalty)
            shares.append(update.Share(stage.index, stage.device, gradients, own))
        shares = [reducing.reduced(engine, self.optimizer, share) for share in shares]
        update.apply(self.optimizer, [self._in_turn(share) for share in shares])
        return penalties

    def _in_turn(self, share: update.Share) -> update.Share:
        """Lets an earlier stage, which works on, have its gradient before the update begins."""
        stage = self.pipeline.stages[share.index]
        sends = any(stage.wanted(self.pipeline.needs_gradient))
        if not sends or len(self.engine.batch.sizes) == 1:
            return share
        with self.engine.place(stage, "update"):
            gradients = gate(share.gradients, self.engine.token(stage))
        return dataclasses.replace(share, gradients=gradients)

    def _penalty_gradients(self, stage: Any, own: list[Any]) -> tuple[Any, list[Any]]:
        values = dict(zip(map(id, stage.weights), self.engine.read[stage.index][0], strict=True))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([values[id(v)] for v in own])
            penalty = step.penalty(self.pipeline, self.engine, stage)
            if penalty is None:
                return None, [None] * len(own)
            scaled = penalty * tf.cast(self.loss_scale, penalty.dtype)
        return penalty, tape.gradient(scaled, [values[id(v)] for v in own])

    # Logs ------------------------------------------------------------------------------------

    def _logs(
        self, backward: Backward, counts: list[list[Any]], y_pred: Any, penalties: list[Any]
    ) -> dict[str, Any]:
        model, last = self.model, self.pipeline.stages[-1]
        with self.engine.place(last, "metrics"):
            parts: list[Any] = []
            for entry, row, values in zip(
                self.losses, counts, backward.loss_values, strict=True
            ):
                value = _local_loss(row, values)
                if entry.tracker is not None:
                    entry.tracker.update_state(value, sample_weight=self.engine.batch.size)
                parts.append(value if entry.weight is None else value * entry.weight)
            parts += [*self.added, *penalties]
            if not parts:
                raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
            total = parts[0]
            for part in parts[1:]:
                total = total + tf.cast(part, total.dtype)
            model._loss_tracker.update_state(total, sample_weight=self.engine.batch.size)
            return model.compute_metrics(
                self.x, self.y, y_pred, sample_weight=self.sample_weight
            )


def _local_loss(counts: Sequence[Any], values: Sequence[Any]) -> tf.Tensor:
    """This rank's loss: the micro-batches' by their denominators."""
    if counts[0] is None:
        return tf.add_n(list(values))
    if len(values) == 1:
        return values[0]
    weights = [tf.cast(count, values[0].dtype) for count in counts]
    total = tf.add_n([v * w for v, w in zip(values, weights, strict=True)])
    return tf.math.divide_no_nan(total, tf.add_n(weights))


def _merged(old: tf.Tensor, states: list[Any], shares: Sequence[float]) -> tf.Tensor:
    """`microbatch.merge` of stacked states: four operations, however many micro-batches."""
    column = tf.constant(shares, old.dtype, shape=[len(shares)] + [1] * old.shape.rank)
    return old + tf.reduce_sum((tf.stack(states) - old) * column, 0)


def _sum(gradients: list[Any]) -> Any:
    if len(gradients) < 2:
        return gradients[0] if gradients else None
    return tf.add_n([tf.convert_to_tensor(g) for g in gradients])


def _shared_state(variable: keras.Variable) -> str:
    return (
        f"The variable {variable.path!r} is changed in two stages. Received: a layer with state "
        "(such as batch normalisation) that is called in several stages. Expected: a cut that "
        "keeps all of its calls in one stage."
    )
