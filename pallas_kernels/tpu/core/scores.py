"""The scores of BRL-Attention that are not normalised: squared ReLU and Laplace (000, section 3.2)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Score = Literal["softmax", "relu2", "laplace"]

_MEAN = math.sqrt(0.5)
_DEVIATION = math.sqrt(0.25 / math.pi)


def check_score(score: str) -> None:
    """Raises ValueError for a score that no kernel has."""
    if score not in get_args(Score):
        raise ValueError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}")


def weigh(score: str, logits: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """relu2: max(u, 0)^2; laplace: the normal distribution function with mean sqrt(1/2), variance 1 / (4
    pi)."""
    if score == "relu2":
        return jnp.square(jnp.maximum(logits, 0.0))
    return 0.5 + 0.5 * jax.lax.erf((logits - _MEAN) * (math.sqrt(0.5) / _DEVIATION))


def slope(score: str, logits: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """Derivative of `weigh`."""
    if score == "relu2":
        return 2.0 * jnp.maximum(logits, 0.0)
    density = jnp.exp(-0.5 * jnp.square((logits - _MEAN) / _DEVIATION))
    return density * (1.0 / (_DEVIATION * math.sqrt(2.0 * math.pi)))
