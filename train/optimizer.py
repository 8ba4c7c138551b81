"""AdamW with a warm-up, a decaying learning rate, clipping, and weight decay on matrices only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

Schedule = Callable[[Any], Any]

# Axes that make no matrix out of a vector: the one that stacks equal layers, the one that cuts features in
# heads (it comes with "heads"), those without a name, and the cores of structured weights, whose size is limited
# where they are used.
_NO_FEATURES = ("layers", "head_dim", "block_in", None)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) and its learning rate."""

    learning_rate: float = 5e-4
    """The highest learning rate, reached at the end of the warm-up."""
    warmup_steps: int = 100
    """Steps in which the learning rate grows from nearly 0."""
    decay: Literal["cosine", "inverse_sqrt", "constant"] = "cosine"
    """How it falls after that: "cosine" down to final_share of it at the last step, "inverse_sqrt" by
    sqrt(warmup_steps / step)."""
    final_share: float = 0.1
    """Share of the highest learning rate that "cosine" ends with."""
    beta1: float = 0.9
    """Decay of the running mean of gradients."""
    beta2: float = 0.95
    """Decay of the running mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root of the latter."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; biases, norms and other vectors have none."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it; 0 switches clipping off."""

    def __post_init__(self):
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share must be 0 to 1, got {self.final_share}")


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate as a function of the number of steps done (int or int32 scalar) -> float32 scalar.

    Linear warm-up: step s (from 0) of `warmup_steps` has the share (s + 1) / warmup_steps, so the first step
    is not wasted. Then, for k steps done: cosine, final + (1 - final) (1 + cos(pi (k - warmup) / (steps -
    warmup))) / 2 (Loshchilov & Hutter 2017, eq. 5), or inverse square root, sqrt(warmup / k) (Vaswani et al.
    2017, section 5.3).

    Args:
      config: the optimiser's settings.
      steps: the number of steps of the whole run, where "cosine" ends.
    """
    warmup = config.warmup_steps

    def schedule(count):
        done = jnp.asarray(count, jnp.float32)
        rise = jnp.minimum(1.0, (done + 1.0) / max(warmup, 1))
        match config.decay:
            case "cosine":
                progress = jnp.clip((done - warmup) / max(steps - warmup, 1), 0.0, 1.0)
                share = config.final_share + (1.0 - config.final_share) * 0.5 * (
                    1.0 + jnp.cos(math.pi * progress)
                )
            case "inverse_sqrt":
                share = jnp.sqrt(max(warmup, 1) / jnp.maximum(done, max(warmup, 1)))
            case _:
                share = jnp.float32(1.0)
        return config.learning_rate * rise * share

    return schedule


def decayed(boxed_params: Any) -> Any:
    """Which parameters are matrices: a pytree of bools like the unboxed parameters.

    A parameter's logical axis names tell a stack of vectors (one a layer) from a matrix, which shapes alone
    can't.

    Args:
      boxed_params: the parameters as `model.init` returns them, with their logical axis names, or their
      shapes.
    """
    specs = nn.get_partition_spec(boxed_params)

    def is_matrix(leaf: Any, spec: PartitionSpec) -> bool:
        return leaf.ndim >= 2 if not spec else sum(axis not in _NO_FEATURES for axis in spec) >= 2

    return jax.tree.map(is_matrix, nn.unbox(boxed_params), specs)


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, decay_mask: Any, rates: Any = None
) -> optax.GradientTransformation:
    """Clipping, then AdamW with `schedule` and weight decay where `decay_mask` (see `decayed`) is True.

    `rates`: what the learning rate of each parameter is multiplied by (`train.mup`), a pytree of floats like the
    parameters; None for one rate. The decay keeps the schedule's rate: a width's smaller rates do not weaken it.
    """
    adamw = optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        *([] if rates is None else [_scale_each(rates)]),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    chain = optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # optax raises floats to integer powers, which strict promotion (the tests') refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def optimizer_of(
    config: OptimizerConfig, steps: int, boxed_params: Any, rates: Any
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimiser of a run of so many steps, and its schedule; see `decayed` and `make_optimizer`."""
    schedule = make_schedule(config, steps)
    return make_optimizer(config, schedule, decayed(boxed_params), rates), schedule


def _scale_each(rates: Any) -> optax.GradientTransformation:
    """Updates times the float at their place."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda u, rate: u * jnp.asarray(rate, u.dtype), updates, rates)
    )
