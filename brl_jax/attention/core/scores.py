"""Score functions sigma that turn logits into attention weights (BRL-Attention, section 2.3).

`softmax` normalises over the keys. `relu2` (squared ReLU, Primer) and `laplace` (Ma et al. 2022, arXiv
2209.10655) do not: every weight stands alone, so keys can be added in any order and masked keys weigh 0.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from brl_jax.attention.core.checks import require

Score = Literal["softmax", "relu2", "laplace"]

_LAPLACE_MEAN = math.sqrt(0.5)
_LAPLACE_DEVIATION = math.sqrt(0.25 / math.pi)


def check_score(score: str) -> None:
    require(score in get_args(Score), f"score must be one of {get_args(Score)}, got {score!r}")


def accumulation_dtype(dtype):
    """float32 for the 16-bit types, else the type itself: what sums over keys are kept in."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


@jax.custom_jvp
def _erf(x):
    """With its textbook derivative: JAX 0.12's own works on constants that shard_map's check of axes refuses."""
    return jax.lax.erf(x)


@_erf.defjvp
def _erf_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _erf(x), (2.0 / math.sqrt(math.pi)) * jnp.exp(-jnp.square(x)) * dx


def elementwise_weights(logits, mask, score: Score):
    """relu2 or laplace of the logits, 0 where `mask` (bool, broadcastable, or None) is False."""
    if score == "relu2":
        weights = jnp.square(jax.nn.relu(logits))
    else:
        weights = 0.5 * (1.0 + _erf((logits - _LAPLACE_MEAN) / (_LAPLACE_DEVIATION * math.sqrt(2.0))))
    return weights if mask is None else jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def softmax_weights(logits, mask):
    """Softmax over the last axis; rows in which `mask` (bool, broadcastable, or None) leaves no key give 0."""
    return jax.nn.softmax(logits, axis=-1, where=mask)


def attention_weights(logits, mask, score: Score):
    """The weights that `score` gives to logits (..., S) under `mask` (bool, broadcastable, or None)."""
    check_score(score)
    if score == "softmax":
        return softmax_weights(logits, mask)
    return elementwise_weights(logits, mask, score)
