"""The three places where Keras itself must know that an optimizer is distributed.

Keras offers no hook for them, so importing `tf_mp.hvd` replaces three members of Keras classes.
Each replacement does what Keras does for every optimizer that is not wrapped.

* `LossScaleOptimizer.apply` checks the gradients for infinities and then, within a `cond`, calls
  the inner optimizer, perhaps wrapped (Keras itself wraps the optimizer so at `compile` for
  `mixed_float16`). A reduction in there would run on the ranks without an infinity only, and pair
  one rank's step with another rank's next one. So the gradients are reduced before the check.
* `Trainer._resolve_auto_jit_compile` and `Trainer.jit_compile`: XLA cannot compile Horovod's
  operations. "auto" becomes False, an explicit True is refused.
"""

from typing import Any

import keras

from tf_mp import compat
from tf_mp.hvd.optimizer import distributed_in, gradients_are_reduced

__all__ = ["install"]

_Scaled = keras.optimizers.LossScaleOptimizer
_plain_apply = _Scaled.apply
_plain_auto = compat.auto_jit_compile
_plain_jit_compile = compat.Trainer.jit_compile


def install() -> None:
    """Puts the replacements in place; a second call changes nothing."""
    _Scaled.apply = _apply
    compat.replace_auto_jit_compile(_auto)
    compat.Trainer.jit_compile = property(_get_jit_compile, _set_jit_compile)


def _apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
    inner = distributed_in(self.inner_optimizer)
    if inner is None or not list(grads):
        _plain_apply(self, grads, trainable_variables)
        return
    given = trainable_variables
    variables = compat.trainable_variables_of(self) if given is None else list(given)
    if not self.built:
        compat.build_outside(self, variables)
    reduced = inner.reduce_gradients(grads, variables)
    with gradients_are_reduced(inner):
        _plain_apply(self, reduced, None if given is None else variables)


def _auto(self: Any) -> bool:
    if distributed_in(getattr(self, "optimizer", None)) is not None:
        return False
    return _plain_auto(self)


def _get_jit_compile(self: Any) -> bool:
    # Whoever wraps the optimizer of a model that was compiled before must not meet XLA either.
    if distributed_in(getattr(self, "optimizer", None)) is not None:
        return False
    return _plain_jit_compile.fget(self)


def _set_jit_compile(self: Any, value: Any) -> None:
    if value and distributed_in(getattr(self, "optimizer", None)) is not None:
        raise ValueError(
            f"Received: jit_compile={value} with an optimizer wrapped by DistributedOptimizer. "
            "Expected: jit_compile=False or 'auto', for XLA cannot compile Horovod's operations."
        )
    _plain_jit_compile.fset(self, value)
