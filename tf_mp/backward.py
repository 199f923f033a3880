"""The backward half of a training step: one tape a stage and micro-batch.

A stage's forward runs under its own `tf.GradientTape`, and its gradient is taken inside the
stage's device scope: so the work of the backward lies where the forward's did. With `recompute`
the forward is done again inside the backward, and only the stage's inputs are kept until then.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_mp import compat, early
from tf_mp.engine import Engine
from tf_mp.loss import OutputLoss
from tf_mp.stage import Stage, Tensors, gate, loops_in_turn, seal

__all__ = ["Backward"]


class Backward:
    """The backward half of a training step.

    Args:
        engine: The engine, whose forwards were run with `watch`.
        losses: The compiled losses.
        loss_stage: For each loss the stage of its output.
        loss_keys: For each loss the key of its output.
        scales: For each loss and micro-batch the factor of its gradient (scalar).
        extra_scales: For each micro-batch the factor of what `add_loss` gave.
        wanted: For each stage, for each input, whether its gradient is wanted.
        recompute: For each stage whether the forward is done again.
    """

    def __init__(
        self,
        engine: Engine,
        losses: Sequence[OutputLoss],
        loss_stage: Sequence[int],
        loss_keys: Sequence[int],
        scales: Sequence[Sequence[Any]],
        extra_scales: Sequence[Any],
        wanted: Sequence[Sequence[bool]],
        recompute: Sequence[bool],
    ) -> None:
        self.engine, self.losses = engine, losses
        self.loss_stage, self.loss_keys, self.scales = loss_stage, loss_keys, scales
        self.extra_scales, self.wanted, self.recompute = extra_scales, wanted, recompute
        count = len(engine.batch.sizes)
        self.labels = [engine.batch.slices(entry.y_true) for entry in losses]
        self.weights = [engine.batch.slices(entry.sample_weight) for entry in losses]
        self.loss_values: list[list[Any]] = [[None] * count for _ in losses]
        self.gradients: list[dict[int, list[Any]]] = [{} for _ in range(count)]
        self.sums: list[list[Any]] = [[] for _ in engine.stages]
        self.present: list[list[int] | None] = [None for _ in engine.stages]

    def run(self, k: int, i: int) -> None:
        """Runs the backward of micro-batch i in stage k."""
        engine, stage = self.engine, self.engine.stages[k]
        with engine.place(stage, "backward", i):
            self._losses(stage, i)
            upstream = self._upstream(stage, i)
            found = self._gradients(stage, i, upstream)
            if found is None:
                return
            weights, inputs = found
            present = [j for j, g in enumerate(weights) if g is not None]
            assert self.present[k] in (None, present), "gradients differ between micro-batches"
            self.present[k] = present
            sums, inputs, token = stage.finish()(
                self.sums[k], [weights[j] for j in present], inputs, engine.token(stage)
            )
            self.sums[k] = sums
            engine.done(stage, token)
        keys = [key for key, want in zip(stage.inputs, self.wanted[k], strict=True) if want]
        for key, gradient in zip(keys, inputs, strict=True):
            if gradient is not None:
                self.gradients[i].setdefault(key, []).append(gradient)

    def _losses(self, stage: Stage, i: int) -> None:
        """The losses of the stage's outputs, and their gradients."""
        own = [j for j, home in enumerate(self.loss_stage) if home == stage.index]
        if not own:
            return
        losses = [self.losses[j] for j in own]

        def body(outputs: Tensors, masks: Tensors, labels: Any, weights: Any, scales: Any,
                 token: Any) -> tuple[Any, Any]:  # fmt: skip
            outputs = gate(outputs, token)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(outputs)
                values, total = [], []
                for j, entry in enumerate(losses):
                    output = outputs[j]
                    if masks[j] is not None:
                        output = tf.identity(output)
                        compat.set_mask(output, masks[j])
                    value = entry.value(output, labels[j], weights[j])
                    values.append(value)
                    total.append(value * tf.cast(scales[j], value.dtype))
                total = tf.add_n(total)
            return values, tape.gradient(total, outputs)

        pairs = [self.engine.values[i][self.loss_keys[j]] for j in own]
        run = stage.function("loss", body)
        values, gradients = run(
            [t for t, _ in pairs], [m for _, m in pairs], [self.labels[j][i] for j in own],
            [self.weights[j][i] for j in own], [self.scales[j][i] for j in own],
            self.engine.token(stage),
        )  # fmt: skip
        for j, value, gradient in zip(own, values, gradients, strict=True):
            self.loss_values[j][i] = value
            if gradient is not None:
                self.gradients[i].setdefault(self.loss_keys[j], []).append(gradient)

    def _upstream(self, stage: Stage, i: int) -> Tensors:
        """For each output of the stage its summed gradient, or None."""
        found = [self.gradients[i].pop(key, []) for key in stage.outputs]
        return [tf.add_n(parts) if len(parts) > 1 else (parts[0] if parts else None)
                for parts in found]  # fmt: skip

    def _gradients(self, stage: Stage, i: int, upstream: Tensors) -> tuple[Any, Any] | None:
        k, engine = stage.index, self.engine
        made = engine.made.pop((k, i))
        scale = None if made.loss is None else tf.cast(self.extra_scales[i], made.loss.dtype)
        if scale is None and all(g is None for g in upstream):
            return None
        if not stage.weights and not any(self.wanted[k]):
            return None
        token = engine.token(stage)
        if self.recompute[k]:
            run = stage.function("again", self._again(stage))
            return run(*engine.arguments(stage, i), upstream, scale, token)
        *upstream, scale = gate([*upstream, scale], token)
        tape, arguments = engine.tapes.pop((k, i)), engine.arguments(stage, i)
        assert tape is not None
        with loops_in_turn(token) as loops, early.waits(token, [*upstream, scale]):
            found = _pull(tape, made.outputs, made.loss, upstream, scale,
                          arguments[0], _picked(arguments[3], self.wanted[k]))  # fmt: skip
        if loops:
            engine.done(stage, seal(loops, token))
        return found

    def _again(self, stage: Stage) -> Any:
        """The forward once more and its gradient, in one function on the stage's device."""
        wanted = self.wanted[stage.index]

        def body(weights: Any, state: Any, seeds: Any, inputs: Any, masks: Any, step: Any,
                 number: Any, upstream: Any, scale: Any, token: Any) -> Any:  # fmt: skip
            # The forward waits for the upstream gradients: else TensorFlow merges it with the
            # first one, and keeps all activations after all.
            token = seal(upstream, token)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights + _picked(inputs, wanted))
                outputs, _, _, loss, _ = stage._forward(
                    True, weights, state, seeds, inputs, masks, step, number, token
                )
            with loops_in_turn(token) as loops:
                found = _pull(
                    tape, outputs, loss, upstream, scale, weights, _picked(inputs, wanted)
                )
            if loops:
                token = seal(loops, token)
                found = gate(found[0], token), gate(found[1], token)
            return found

        return body


def _picked(tensors: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]


def _pull(
    tape: tf.GradientTape,
    outputs: Tensors,
    loss: Any,
    upstream: Tensors,
    scale: Any,
    weights: Tensors,
    inputs: Tensors,
) -> tuple[Tensors, Tensors]:
    """The gradients of weights and inputs, given those of outputs and of the added loss."""
    pairs = [(t, g) for t, g in zip(outputs, upstream, strict=True) if g is not None]
    if loss is not None and scale is not None:
        pairs.append((loss, scale))
    targets, gradients = [t for t, _ in pairs], [g for _, g in pairs]
    found = tape.gradient(targets, weights + inputs, output_gradients=gradients)
    return found[: len(weights)], found[len(weights) :]
