"""Score functions sigma that turn logits into attention weights (BRL-Attention, section 2.3).

`softmax` normalises over the keys. `relu2` (squared ReLU, Primer) and `laplace` (Ma et al. 2022, arXiv:2209.10655) do
not: no weight depends on the other keys, so keys can be added in any order, and masked keys weigh 0.
"""

from __future__ import annotations

import jax.numpy as jnp

from brl_jax.attention.core.softmax import MASKED, softmax_weights
from pallas_kernels import scores
from pallas_kernels.scores import Score, check_score


def accumulation_dtype(dtype):
    """The dtype for sums over keys: float32 for 16-bit types, else the type itself."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def weights_dtype(dtype, score: str):
    """The dtype in which weights multiply values: the values' own, except for float16 with a score that is not
    normalised. There it is float32, because weights may exceed float16's maximum of 65,504 even if outputs do not."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 and score != "softmax" else jnp.dtype(dtype)


def soft_cap(logits, cap: float):
    """cap tanh(logits / cap): close to small logits, and never beyond +-cap (arXiv:2408.00118, section 2)."""
    return cap * jnp.tanh(logits * (1.0 / cap))


def soft_cap_slope(capped, cap: float):
    """The derivative of `soft_cap`, from its result; 0 for the constant of masked scores."""
    return jnp.maximum(1.0 - jnp.square(capped * (1.0 / cap)), 0.0)


def elementwise_weights(logits, mask, score: Score):
    """relu2 or laplace of the logits, 0 where `mask` (bool, broadcastable, or None) is False."""
    weights = scores.elementwise_weights(score, logits)
    return weights if mask is None else jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def seen_with_bias(bias):
    """False where a bias hides its key: it is -inf, or the lowest finite float32 or bfloat16, which is below the score
    of a masked key."""
    return ~(bias <= MASKED / 2)


def hide_infinite_bias(bias, mask):
    """The mask, extended to hide keys with a bias of -inf, so that rows without other keys give 0 instead of NaN."""
    if bias is None:
        return mask
    finite = seen_with_bias(bias)
    return finite if mask is None else mask & finite


def attention_weights(logits, mask, score: Score):
    """The weights that `score` gives to logits (..., S) under `mask` (bool, broadcastable, or None)."""
    check_score(score)
    if score == "softmax":
        return softmax_weights(logits, mask)
    return elementwise_weights(logits, mask, score)
