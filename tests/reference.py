"""The unsplit Keras model on the same micro-batches: what the split model must equal."""

import keras
import numpy as np
import tensorflow as tf

from tf_mp import compat, microbatch, randomness


class Keep(keras.optimizers.Optimizer):
    """An optimizer that keeps each gradient and leaves the weights alone."""

    def __init__(self, **kwargs):
        super().__init__(learning_rate=0.0, **kwargs)

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.kept = self.add_optimizer_variables(variables, "kept")

    def update_step(self, gradient, variable, learning_rate):
        self.assign(self.kept[self._get_variable_index(variable)], tf.convert_to_tensor(gradient))


def gradients_of(model):
    """The gradients that a model with the optimizer `Keep` kept, by the path of the variable."""
    kept = {v.path: k.numpy() for v, k in zip(model.trainable_variables, model.optimizer.kept)}
    assert len(kept) == len(model.trainable_variables)
    return kept


def copy_weights(source, target):
    """Gives `target` the weights, seeds and state of `source`, layer by layer in order."""
    for a, b in zip(source.variables, target.variables, strict=True):
        assert a.shape == b.shape
        b.assign(a.numpy())


def numbers(count, micro_batches):
    sizes = microbatch.sizes(count, micro_batches)
    return [(a, a + n) for a, n in zip(microbatch.offsets(sizes), sizes)]


def cut(structure, start, stop):
    return keras.tree.map_structure(lambda t: None if t is None else t[start:stop], structure)


def denominator(loss, y_true, y_pred, sample_weight):
    """What a loss divides by, worked out in numpy from its documented meaning."""
    mask = compat.get_mask(y_pred)
    if mask is None and getattr(loss, "ignore_class", None) is not None:
        mask = tf.not_equal(y_true, loss.ignore_class)
    mask = None if mask is None else np.asarray(mask, np.float32)
    if loss.reduction == "sum":
        return None
    if loss.reduction == "mean_with_sample_weight" and sample_weight is not None:
        weight = np.asarray(sample_weight, np.float32)
        return float((weight * mask).sum() if mask is not None else weight.sum())
    return float(len(y_pred)) if mask is None else float(mask.sum())


def step(
    model, losses, x, y, micro_batches, sample_weight=None, loss_weights=None, number=0, dense=True
):
    """Gradients and new state of one step of a plain model, and its loss.

    Args:
        model: A plain Keras model.
        losses: For each output (in flat order) a Keras loss.
        x, y, sample_weight: numpy, in the model's structures.
        micro_batches: How many.
        loss_weights: For each output its weight, or None.
        number: The global step.
        dense: Whether gradients are numpy, else what an optimizer takes.
    """
    outputs = keras.tree.flatten(model.output)
    ys, weights = keras.tree.flatten(y), [sample_weight] * len(outputs)
    loss_weights = loss_weights or [1.0] * len(outputs)
    count = len(keras.tree.flatten(x)[0])
    generators = []
    for layer in model.layers:
        generators += [g for g in compat.seed_generators(layer) if g not in generators]
    ordered = _in_graph_order(model, generators)
    seeds = [tf.constant(g.state.numpy()) for g in ordered]
    state = [v for v in model.non_trainable_variables if "seed_generator" not in v.path]
    before = [v.numpy() for v in state]
    parts, totals, news = [], [0.0] * len(outputs), []
    with tf.GradientTape(persistent=True) as tape:
        for i, (a, b) in enumerate(numbers(count, micro_batches)):
            keys = randomness.keys(
                seeds, range(len(seeds)), tf.constant(number, tf.int64), tf.constant(i, tf.int64)
            )
            for generator, key in zip(ordered, keys):
                generator.state.assign(key)
            y_pred = keras.tree.flatten(model(cut(x, a, b), training=True))
            penalised = [v for v in model.trainable_variables if v.regularizer is not None]
            added = model.losses[: len(model.losses) - len(penalised)]
            row = []
            for j, loss in enumerate(losses):
                w = None if weights[j] is None else weights[j][a:b]
                value = loss(ys[j][a:b], y_pred[j], w)
                part = denominator(loss, ys[j][a:b], y_pred[j], w)
                totals[j] = totals[j] + (part or 0.0)
                row.append((value, part))
            parts.append((row, added, b - a))
            news.append([v.numpy() for v in state])
            for variable, value in zip(state, before):
                variable.assign(value)
        terms = _terms(parts, totals, loss_weights, count)
        penalties = [v.regularizer(v.value) for v in model.trainable_variables if v.regularizer]
        if penalties:
            terms.append(sum(penalties))
    values = [v.value for v in model.trainable_variables]
    rows = [tape.gradient(term, values, unconnected_gradients="zero") for term in terms]
    gradients = _summed(rows)
    for generator, seed in zip(ordered, seeds):
        generator.state.assign(seed)
    shares = microbatch.shares([size for _, _, size in parts])
    merged = {
        v.path: microbatch.merge(old, [new[j] for new in news], shares)
        for j, (v, old) in enumerate(zip(state, before))
    }
    paths = [v.path for v in model.trainable_variables]
    if dense:
        gradients = [np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients]
    return dict(zip(paths, gradients)), merged, float(sum(terms))


def _terms(parts, totals, loss_weights, count):
    """What each micro-batch adds to the loss."""
    terms = []
    for row, added, size in parts:
        term = sum(tf.reduce_sum(a) for a in added) * (size / count) if added else 0.0
        for j, (value, part) in enumerate(row):
            share = 1.0 if part is None else part / totals[j]
            term += loss_weights[j] * share * value
        terms.append(term)
    return terms


def _summed(rows):
    """One micro-batch after another, for floating point sums depend on their order.

    `IndexedSlices` are joined: so Keras's optimizers get them from a whole batch, and what those
    make of an index that comes twice is not what they make of its sum.
    """
    total = list(rows[0])
    for row in rows[1:]:
        total = [_joined(a, b) for a, b in zip(total, row)]
    return total


def _joined(a, b):
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        values, indices = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def _in_graph_order(model, generators):
    """Generators in the order of the model's calls, which numbers them."""
    from tf_mp.graph import trace

    found = []
    for operation in trace(model).operations:
        found += [g for g in compat.seed_generators(operation.target) if g not in found]
    assert len(found) == len(generators)
    return found
