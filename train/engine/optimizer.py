"""AdamW or Muon with a warm-up, a decaying learning rate, clipping, and weight decay on matrices only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from brl_jax.fields import Checked, NonNegative, Positive, Range
from train.engine.errors import UserError

Schedule = Callable[[Any], Any]

# Axes that do not turn a vector into a matrix: the axis that stacks equal layers, unnamed axes, and the cores of
# structured weights, whose size is limited where they are used. Nor does "head_dim" next to one of _HEADS, whose
# features it divides.
_NO_FEATURES = ("layers", "block_in", None)
_HEADS = ("heads", "kv_heads", "groups")

# Axes of the kernels of a network's inputs and outputs, which Muon leaves to AdamW, as it does unnamed axes.
_ENDS = frozenset(("vocab", "inputs", "pixel", "classes", "outputs", "position", None))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The optimiser and its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """How parameters move: by "adamw" (Loshchilov & Hutter 2019), or the dense weights of the layers by "muon" (Jordan
    et al. 2024), which orthogonalises updates, and the rest by "adamw". Muon's updates are scaled to the size of
    AdamW's (Liu et al. 2025, arXiv:2502.16982, equation 4), so that the same rates and weight decay fit both."""
    learning_rate: Positive = 5e-4
    """The highest learning rate, reached at the end of the warm-up."""
    warmup_steps: Annotated[int, Range(0, 2**31 - 1)] = 100
    """Steps in which the learning rate grows from nearly 0 to its highest value."""
    decay: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """How the rate falls afterwards. "cosine", "linear" and "wsd" end at final_share of the highest rate; "wsd"
    (warm-up, stable, decay) is linear too, but falls in the last decay_share of the steps alone. "inverse_sqrt" is
    sqrt(warmup_steps / step)."""
    decay_share: Annotated[float, Range(0, 1)] = 0.2
    """Share of all steps in which the rate of "wsd" falls."""
    final_share: Annotated[float, Range(0, 1)] = 0.1
    """Share of the highest learning rate that "cosine", "linear" and "wsd" end with."""
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay of the running mean of gradients."""
    beta2: Annotated[float, Range(0, below=1)] = 0.95
    """Decay of the running mean of their squares."""
    epsilon: Positive = 1e-8
    """Added to the square root of that mean."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices; biases, norms and other vectors are not decayed."""
    clip_norm: NonNegative = 1.0
    """Gradients with a larger global norm are scaled down to this norm; 0 switches clipping off."""

    def without_effect(self) -> dict[str, str]:
        without = {} if self.decay == "wsd" else {"decay_share": f"with decay {self.decay}"}
        if self.decay not in ("cosine", "linear", "wsd"):
            without["final_share"] = f"with decay {self.decay}"
        return without


def make_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate as a function of the number of steps done (int or int32 scalar) -> float32 scalar.

    Linear warm-up: step s (from 0) of `warmup_steps` has the share (s + 1) / warmup_steps, so that the first step
    moves the parameters too. Then, after k steps: cosine, final + (1 - final) (1 + cos(pi (k - warmup) / (steps - 1 -
    warmup))) / 2 (Loshchilov & Hutter 2017, eq. 5), linear between the same ends, "wsd", which is 1 and then linear (Hu
    et al. 2024, arXiv:2404.06395, section 4), or inverse square root, sqrt(warmup / k) (Vaswani et al. 2017, section
    5.3). The last step, after steps - 1, has the final share.
    """
    highest, warmup = config.learning_rate, config.warmup_steps
    fall = max(steps - 1 - warmup, 1)
    match config.decay:
        case "cosine":
            decay = optax.cosine_decay_schedule(highest, fall, config.final_share)
        case "linear" | "wsd":
            falling = (
                fall if config.decay == "linear" else min(fall, max(round(config.decay_share * steps), 1))
            )
            # As floats, because optax computes with them in int32, where the largest counts do not fit.
            decay = optax.linear_schedule(
                highest, config.final_share * highest, float(falling), float(fall - falling)
            )
        case "inverse_sqrt":
            first = max(warmup, 1)

            def decay(count):
                return highest * jnp.sqrt(first / jnp.maximum(count + warmup, first))
        case _:
            decay = optax.constant_schedule(highest)
    if warmup:
        # optax counts the steps of each schedule from its own start.
        rise = optax.linear_schedule(highest / warmup, highest, warmup - 1)
        decay = optax.join_schedules([rise, decay], [warmup])

    def schedule(count):
        # As a float, because optax mixes the count with floats, which the tests' strict promotion refuses.
        rate = decay(jnp.asarray(count, jnp.float32))
        # Fused with what reads it, the rate would be rounded differently in a call of several steps.
        return jax.lax.optimization_barrier(jnp.asarray(rate, jnp.float32))

    return schedule


def decayed(boxed_params: Any) -> Any:
    """Which parameters are matrices: a pytree of bools like the unboxed parameters.

    A parameter's logical axis names distinguish a stack of vectors (one a layer) from a matrix; its shape does not.
    Biases never count as matrices.

    Args:
      boxed_params: the parameters as `model.init` returns them, with their logical axis names, or their
      shapes.
    """
    specs = nn.get_partition_spec(boxed_params)

    def is_matrix(path: Any, leaf: Any, spec: PartitionSpec) -> bool:
        if is_bias(path):
            return False
        if not spec:
            return leaf.ndim >= 2
        without = (*_NO_FEATURES, "head_dim") if any(axis in _HEADS for axis in spec) else _NO_FEATURES
        return sum(axis not in without for axis in spec) >= 2

    return jax.tree_util.tree_map_with_path(is_matrix, nn.unbox(boxed_params), specs)


def is_bias(path: Any) -> bool:
    """Whether the name of the parameter at a jax.tree_util path says that it is a bias."""
    last = jax.tree_util.keystr(path[-1:], simple=True)
    return last == "bias" or last.endswith("_bias")


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, decay_mask: Any, rates: Any = None, muon: Any = None
) -> optax.GradientTransformation:
    """Clipping, then AdamW or Muon with `schedule`, and weight decay where `decay_mask` (see `decayed`) is True.

    Args:
      rates: the factor on the learning rate of each parameter (`mup`), a pytree of floats like the parameters; None for
        the same rate everywhere. The weight decay keeps the schedule's rate, so that a wide model's smaller rates do
        not weaken it.
      muon: which parameters Muon moves (`orthogonalized`); None: all by AdamW.
    """
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    optimizer = optax.chain(
        adam if muon is None else _muon(adam, muon),
        *([] if rates is None else [_scale_each(rates)]),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    chain = (
        optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # optax raises floats to integer powers, which the tests' strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(updates, state, params)

    return optax.GradientTransformation(chain.init, update)


def optimizer_of(
    config: OptimizerConfig, steps: int, boxed_params: Any, rates: Any
) -> tuple[optax.GradientTransformation, Schedule]:
    """The optimiser of a run with this number of steps, and its schedule; see `decayed` and `make_optimizer`."""
    schedule, muon = make_schedule(config, steps), None
    if config.optimizer == "muon":
        if rates is not None:
            raise UserError("--optimizer muon: muP's learning rates (--mup_base_width) are adamw's")
        muon = orthogonalized(boxed_params)
    return make_optimizer(config, schedule, decayed(boxed_params), rates, muon), schedule


def orthogonalized(boxed_params: Any) -> Any:
    """What Muon moves, the dense weights between the features of a network's layers: a pytree like the unboxed
    parameters of MuonDimensionNumbers, or None for AdamW.

    All heads of a projection are one matrix; stacked layers are one matrix each.
    """
    specs = nn.get_partition_spec(boxed_params)

    def axes(path: Any, leaf: Any, spec: PartitionSpec) -> MuonDimensionNumbers | None:
        first = 1 if spec and spec[0] == "layers" else 0
        is_kernel = jax.tree_util.keystr(path[-1:], simple=True) == "kernel"
        if not is_kernel or leaf.ndim < first + 2 or not _ENDS.isdisjoint(spec[first:]):
            return None
        # Inputs come first. They take two axes if a head's features or a block's tokens are among them.
        split = first + (2 if spec[first] in (*_HEADS, "head_dim") else 1)
        return MuonDimensionNumbers(tuple(range(first, split)), tuple(range(split, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(axes, nn.unbox(boxed_params), specs)


def _muon(adam: optax.GradientTransformation, axes: Any) -> optax.GradientTransformation:
    """Muon where `axes` has dimension numbers, and `adam` elsewhere."""
    is_leaf = lambda x: x is None or isinstance(x, MuonDimensionNumbers)  # noqa: E731
    labels = jax.tree.map(lambda x: "adam" if x is None else "muon", axes, is_leaf=is_leaf)
    moved = jax.tree.map(lambda x: optax.MaskedNode() if x is None else x, axes, is_leaf=is_leaf)

    def to_adams_size(updates: Any, _: Any) -> Any:
        def scaled(numbers: MuonDimensionNumbers, update: Any) -> Any:
            sides = (math.prod(update.shape[i] for i in side) for side in numbers)
            return update * (0.2 * math.sqrt(max(sides)))

        return jax.tree.map(scaled, moved, updates, is_leaf=is_leaf)

    muon = optax.chain(scale_by_muon(weight_dimension_numbers=moved), optax.stateless(to_adams_size))
    return optax.partition({"muon": muon, "adam": adam}, labels)


def _scale_each(rates: Any) -> optax.GradientTransformation:
    """Multiplies each update by its float in `rates`."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda u, rate: u * jnp.asarray(rate, u.dtype), updates, rates)
    )
