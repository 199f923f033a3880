"""The plan of a split model: its stages, their devices, micro-batches and schedule."""

import dataclasses
import itertools
from typing import Any

import keras

from tf_mp import compat
from tf_mp import schedule as schedules
from tf_mp.cutting import Cut
from tf_mp.graph import Graph
from tf_mp.stage import Stage

__all__ = ["Pipeline", "pipeline_of", "restart_tags"]

_tags = itertools.count()


def restart_tags() -> None:
    """Counts the tags of pipelines from 0 again, as ranks that have just started do.

    Tags are in the names of collectives, by which Horovod pairs the ranks.
    """
    global _tags
    _tags = itertools.count()


@dataclasses.dataclass(eq=False)
class Pipeline:
    """How a model is split; `tf_mp.pipeline_of(model)` gives it.

    Attributes:
        graph: The model as an ordered list of operations.
        cut: Which operations make which stage, and how that was decided.
        stages: The stages, each with `index`, `device`, `operations` and `variables`.
        micro_batches: How many micro-batches a local batch is cut into.
        schedule: Name of the schedule, `"1f1b"` or `"gpipe"`.
        recompute: For each stage whether its forward is done again in the backward.
        first_micro_batch: Index of this rank's first micro-batch among those of all ranks; None:
            every rank has as many. `dealing.Share` tells it.
    """

    graph: Graph
    cut: Cut
    stages: tuple[Stage, ...]
    micro_batches: int
    schedule: str
    recompute: tuple[bool, ...]
    first_micro_batch: int | None = None

    def __post_init__(self) -> None:
        self.tag = f"{self.graph.model.name}_{next(_tags)}"
        names = list(dict.fromkeys(stage.device for stage in self.stages))
        self.device_of = tuple(names.index(stage.device) for stage in self.stages)
        self._home_of_key = {
            key: stage.index
            for stage in self.stages
            for operation in stage.operations
            for key in operation.outputs
        }
        #: For each variable, by id, the index of the stage where it lives: the first that uses it.
        self.homes: dict[int, int] = {}
        for stage in self.stages:
            for variable in stage.variables:
                self.homes.setdefault(id(variable), stage.index)
        #: The outputs in the structure that the model returns: a list of one is its entry.
        self.structure = keras.tree.map_structure(
            lambda tensor: tensor, self.graph.function._outputs_struct
        )
        if isinstance(self.structure, (list, tuple)) and len(self.structure) == 1:
            self.structure = self.structure[0]

    def home_of(self, key: int) -> int:
        """The stage that makes a tensor; stage 0 for a model input."""
        return self._home_of_key.get(key, 0)

    def standardize(self, x: Any) -> list[Any]:
        """The model's flat inputs in Keras's order and dtype; None for an absent one."""
        return list(self.graph.function._standardize_inputs(x))

    def schedule_of(self, micro_batches: int) -> schedules.Schedule:
        """The table of actions for this many micro-batches."""
        return schedules.build(
            self.schedule, len(self.stages), micro_batches, stage_devices=self.device_of
        )

    @property
    def needs_gradient(self) -> set[int]:
        """Keys of the tensors that depend on a weight, so that their gradient is needed."""
        found: set[int] = set()
        for stage in self.stages:
            for operation in stage.operations:
                trains = any(variable.trainable for variable in operation.variables)
                if trains or any(key in found for key in operation.inputs):
                    pairs = zip(operation.outputs, operation.dtypes, strict=True)
                    found |= {key for key, dtype in pairs if dtype.startswith(("float", "bfloat"))}
        return found

    def reset(self) -> None:
        """Forgets all traces; after `compile`."""
        for stage in self.stages:
            stage.reset()

    def describe(self) -> str:
        """The stages in words, a line each."""
        lines = []
        for stage in self.stages:
            own = [v for v in stage.variables if self.homes[id(v)] == stage.index]
            count = sum(int(v.shape.num_elements()) for v in own if v.trainable)
            names = [op.name for op in stage.operations]
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(
                f"stage {stage.index} on {stage.device}: {len(names)} operations ({span}), "
                f"{count:,} trainable parameters"
            )
        return "\n".join(lines)


def pipeline_of(model: keras.Model) -> Pipeline:
    """The plan of a model that `parallelize` returned.

    Raises:
        ValueError: for a model that is not split.
    """
    found = getattr(model, "_tf_mp_pipeline", None)
    if not isinstance(found, Pipeline):
        raise ValueError(
            f"The model {getattr(model, 'name', model)!r} is not split. Received: "
            f"{type(model).__name__}. Expected: what tf_mp.parallelize(...) returned."
        )
    return found


def move(pipeline: Pipeline) -> dict[int, str]:
    """Puts each variable on its stage's device; returns the device of each by id."""
    moved: dict[int, str] = {}
    for stage in pipeline.stages:
        for variable in stage.variables:
            if pipeline.homes[id(variable)] == stage.index:
                compat.initialise_on(variable, stage.device)
                moved[id(variable)] = stage.device
    return moved
