"""The score functions of BRL-Attention, and the weights of those that do not normalise (OpenReview Vpyg3fqXbl, section
2.3).

`softmax` normalises over the keys. `relu2` (squared ReLU, arXiv:2109.08668) and `laplace` (arXiv:2209.10655) do not: a
key's weight depends on its own logit alone. The TPU kernels and `brl_jax` share these definitions.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Score = Literal["softmax", "relu2", "laplace"]

_LAPLACE_MEAN = math.sqrt(0.5)
_LAPLACE_DEVIATION = math.sqrt(0.25 / math.pi)


def check_score(score: str) -> None:
    """Raises ValueError unless `score` is one of `Score`."""
    if score not in get_args(Score):
        raise ValueError(f"score must be one of {', '.join(get_args(Score))}, got {score!r}")


def elementwise_weights(score: str, logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the weights that "relu2" or "laplace" assigns to logits.

    relu2 is max(u, 0)^2; laplace is the normal distribution function with mean sqrt(1/2) and variance 1 / (4 pi).
    """
    return jnp.square(jnp.maximum(logits, 0.0)) if score == "relu2" else _laplace(logits)


def elementwise_slopes(score: str, logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the derivative of `elementwise_weights` with respect to the logits."""
    return 2.0 * jnp.maximum(logits, 0.0) if score == "relu2" else _laplace_slope(logits)


@jax.custom_jvp
def _laplace(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Laplace weights, with a custom derivative: JAX 0.12 differentiates `erf` with constants that `shard_map`'s check
    of mesh axes rejects."""
    return 0.5 + 0.5 * jax.lax.erf((logits - _LAPLACE_MEAN) * (math.sqrt(0.5) / _LAPLACE_DEVIATION))


@_laplace.defjvp
def _laplace_jvp(primals, tangents):
    (logits,), (tangent,) = primals, tangents
    return _laplace(logits), _laplace_slope(logits) * tangent


def _laplace_slope(logits: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    density = jnp.exp(-0.5 * jnp.square((logits - _LAPLACE_MEAN) / _LAPLACE_DEVIATION))
    return density * (1.0 / (_LAPLACE_DEVIATION * math.sqrt(2.0 * math.pi)))
