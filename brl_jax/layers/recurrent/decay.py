"""Token-dependent decay, as recurrent layers parametrise it."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.layers.core.modules import parameter


def step_decay(
    module: nn.Module, x: Float[Array, "B T N ..."], axes: tuple[str | None, ...], *, slowest: float = 0.01
) -> tuple[Float[Array, "B T N ..."], Float[Array, "B T N ..."]]:
    """Returns log decays -exp(rate) steps, below 0, and steps = softplus(x + step_bias), in float32 (Mamba-2,
    arXiv:2405.21060).

    Call it inside a compact module, which gets the parameters `rate` (N,) and `step_bias` (N, ...). As in the published
    networks, exp(rate) starts uniform between `slowest` and 16, and softplus(step_bias) log-uniform between 0.001 and
    0.1.

    Args:
      axes: logical names of the dimensions of x after the length.
    """
    sizes = x.shape[2:]

    def rates(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, slowest, 16.0))

    rate = parameter(module, "rate", rates, sizes[:1], axes[:1]).astype(jnp.float32)
    step_bias = parameter(module, "step_bias", _step_biases, sizes, axes).astype(jnp.float32)
    steps = jax.nn.softplus(x.astype(jnp.float32) + step_bias[None, None])
    return -jnp.exp(rate).reshape(1, 1, -1, *(1 for _ in sizes[1:])) * steps, steps


def _step_biases(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(0.001), math.log(0.1)))
    return steps + jnp.log(-jnp.expm1(-steps))  # softplus's inverse
