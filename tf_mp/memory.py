"""The bytes that each stage of a split model keeps on its device.

Weights, gradients and slots are exact: a weight that several stages use counts where it lives. The
activations are those that the operations make; what a layer keeps inside for its own backward is
not known before it runs, and some of the outputs need not be kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tf_mp.cost import OperationCost, num_bytes
from tf_mp.pipeline import Pipeline
from tf_mp.recording import HOST
from tf_mp.timing import plain_copy

__all__ = ["StageBytes", "own_variables", "sent_bytes", "slot_bytes", "stage_bytes"]


class StageBytes(NamedTuple):
    """What a stage keeps on its device during a step.

    Attributes:
        weights: Trainable weights and other variables that live there.
        gradients: One accumulated gradient for each trainable weight that lives there.
        slots: What the optimizer keeps for these weights.
        activations: What one micro-batch in flight keeps until its backward.
        in_flight: The most micro-batches in flight.
        working: With recomputation, the activations of the one micro-batch that is being redone.
    """

    weights: int
    gradients: int
    slots: int
    activations: int
    in_flight: int
    working: int = 0

    @property
    def total(self) -> int:
        """All of it together, at the fullest moment."""
        kept = self.activations * self.in_flight + self.working
        return self.weights + self.gradients + self.slots + kept


def stage_bytes(
    pipeline: Pipeline,
    costs: Sequence[OperationCost],
    optimizer: keras.optimizers.Optimizer,
    in_flight: Sequence[int],
) -> list[StageBytes]:
    """The bytes of every stage.

    Args:
        pipeline: The plan of a split model.
        costs: The measured operations, in the graph's order.
        optimizer: What trains it; only its kind and settings are looked at.
        in_flight: For each stage the most micro-batches in flight.
    """
    made = _bytes_by_key(pipeline, costs)
    found = []
    for stage, count, again in zip(pipeline.stages, in_flight, pipeline.recompute, strict=True):
        variables = own_variables(pipeline, stage.index)
        trained = [v for v in variables if v.trainable]
        received = sum(made.get(key, 0) for key in stage.inputs)
        inside = sum(made[key] for operation in stage.operations for key in operation.outputs)
        found.append(
            StageBytes(
                weights=sum(map(num_bytes, variables)),
                gradients=sum(map(num_bytes, trained)),
                slots=slot_bytes(optimizer, trained),
                activations=received if again else received + inside,
                in_flight=count,
                working=inside if again else 0,
            )
        )
    return found


def own_variables(pipeline: Pipeline, stage: int) -> list[keras.Variable]:
    """The variables that live in a stage: those that it is the first to use."""
    variables = pipeline.stages[stage].variables
    return [v for v in variables if pipeline.homes[id(v)] == stage]


def sent_bytes(pipeline: Pipeline, costs: Sequence[OperationCost], stage: int) -> int:
    """What one micro-batch of a stage sends on: a tensor counts for each stage that reads it."""
    made = _bytes_by_key(pipeline, costs)
    later = [key for other in pipeline.stages[stage + 1 :] for key in other.inputs]
    sent = set(pipeline.stages[stage].outputs)
    return sum(made[key] for key in later if key in sent)


def slot_bytes(optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> int:
    """What an optimizer of this kind keeps for some trainable variables.

    What it keeps once for all (its step counter and learning rate) does not count.
    """
    if not variables:
        return 0
    copy = plain_copy(optimizer)
    with tf.device(HOST):
        copy.build(list(variables))
    shared = {id(v) for v in vars(copy).values() if isinstance(v, keras.Variable)}
    return sum(num_bytes(v) for v in copy.variables if id(v) not in shared)


def _bytes_by_key(pipeline: Pipeline, costs: Sequence[OperationCost]) -> dict[int, int]:
    return {
        key: size
        for operation, cost in zip(pipeline.graph.operations, costs, strict=True)
        for key, size in zip(operation.outputs, cost.output_bytes, strict=True)
    }
