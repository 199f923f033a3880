"""Training that goes on while ranks leave and join, as if nothing had happened.

The time between two changes of the ranks is a *round*. In each round all ranks, those that stayed
and those that are new, run the same function from its beginning: they agree, read their share of
the data, build the model for it and go on from the last step that is kept in memory. So a new rank
needs nothing of its own, and nothing traced for another number of ranks is left over.

The global batch and its micro-batches stay what they were in the first round (the *plan*). With
them stay the learning rate, the samples of each step and all random draws.
"""

import gc
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tf_mp import checkpoint, devices, pipeline, world

__all__ = ["Memory", "run"]


class Memory:
    """The plan of a run and its last kept step, in the memory of each rank.

    Args:
        active: keep steps. In a run whose ranks do not change there is nothing to keep them for.
        every: steps from one that is kept to the next. More are done again when a rank is lost,
            and new ranks wait longer; each keeps a copy of all variables on the host.

    Attributes:
        step: the step that is kept, or None.
    """

    def __init__(self, active: bool = False, every: int = 10) -> None:
        if every < 1:
            raise ValueError(f"Received: {every=}. Expected: at least 1 step.")
        self.active, self.every = active, every
        self.step: int | None = None
        self.look: Callable[[], None] | None = None
        self._values: list[np.ndarray] = []
        self._plan: dict[str, int] | None = None

    def plan(self, fresh: dict[str, int], former: dict[str, Any]) -> dict[str, int]:
        """What the run began with; every rank must call it.

        Args:
            fresh: what a run that begins now would have, by name.
            former: what the newest checkpoint was made with, if there is one.

        Returns:
            What another rank remembers of an earlier round; else, where ranks may change, the
            former values; else the fresh ones of the root.
        """
        plans = world.exchange([self._plan, fresh], what="the plan of the run")
        remembered = [plan for plan, _ in plans if plan is not None]
        begins = plans[0][1]
        if self.active and all(isinstance(former.get(name), int) for name in fresh):
            begins = {name: former[name] for name in fresh}
        self._plan = remembered[0] if remembered else begins
        return self._plan

    def keep(self, model: keras.Model, step: int) -> None:
        """Copies all variables of a model and its optimizer into memory."""
        self._values = [variable.numpy().copy() for variable in checkpoint.state_of(model)]
        self.step = step

    def restore(self, model: keras.Model) -> int | None:
        """Puts what is kept on any rank into the models of all; every rank must call it.

        Returns:
            The steps that it had made; None where no rank has kept one.
        """
        steps = world.exchange(self.step, what="the step that is kept in memory")
        known = [step for step in steps if step is not None]
        if not known:
            return None
        root = steps.index(max(known))
        variables = checkpoint.state_of(model)
        if world.current().rank == root:
            for variable, value in zip(variables, self._values, strict=True):
                variable.assign(value)
        if world.current().size > 1:
            from tf_mp import hvd

            hvd.broadcast_variables(variables, root_rank=root)
        self.keep(model, max(known))
        return self.step

    def callback(self, first_step: int) -> keras.callbacks.Callback:
        """What keeps steps during `fit`; the last one in the list, for it may end the round.

        Args:
            first_step: the steps made before this `fit`.
        """
        return _Keep(self, first_step) if self.active else keras.callbacks.Callback()


class _Keep(keras.callbacks.Callback):
    """Keeps every few steps and the last one, and looks then whether ranks come or go."""

    def __init__(self, memory: Memory, first_step: int) -> None:
        super().__init__()
        self._memory, self._step = memory, first_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._step += 1
        if self._step % self._memory.every == 0:
            self._memory.keep(self.model, self._step)
            if self._memory.look is not None:
                self._memory.look()

    def on_train_end(self, logs: Any = None) -> None:
        self._memory.keep(self.model, self._step)


def run(train: Callable[[Memory], None], memory: Memory) -> None:
    """Trains, and where ranks may change trains again after each change until it is done.

    Args:
        train: does all that follows `tf_mp.init`, from what the memory holds. It must be the same
            on every rank.
        memory: of this rank; new in each process.

    Raises:
        ValueError: ranks may change, but not under this launcher.
    """
    if not memory.active:
        train(memory)
        return
    if "HOROVOD_ELASTIC" not in os.environ:
        raise ValueError(
            "Received: an elastic run without Horovod's elastic launcher. Expected: horovodrun "
            "--gloo --min-np 1 --max-np 2 --host-discovery-script FILE python ... --elastic. See "
            "scripts/discover_hosts.sh."
        )
    from tf_mp.hvd import elastic

    rounds = 0

    def one_round(_: Any) -> None:
        nonlocal rounds
        rounds += 1
        if rounds > 1:
            _begin_again()
        train(memory)

    listener = elastic.listener()
    memory.look = listener.check_host_updates
    elastic.run(one_round)(listener)


def _begin_again() -> None:
    """Forgets the model of the last round, and meets the ranks that are new."""
    keras.backend.clear_session()
    pipeline.restart_tags()
    gc.collect()
    devices.meet()
    world.say(f"the ranks have changed: now {world.current().size}.")
