"""Score functions sigma that turn logits into attention weights (BRL-Attention, section 2.3).

`softmax` normalises over the keys. `relu2` (squared ReLU, Primer) and `laplace` (Ma et al. 2022, arXiv:2209.10655) do
not: every weight stands alone, so keys can be added in any order and masked keys weigh 0.
"""

from __future__ import annotations

import jax.numpy as jnp

from brl_jax.attention.core.softmax import MASKED, softmax_weights
from pallas_kernels import scores
from pallas_kernels.scores import Score, check_score


def accumulation_dtype(dtype):
    """float32 for the 16-bit types, else the type itself: what sums over keys are kept in."""
    return jnp.dtype(jnp.float32) if jnp.dtype(dtype).itemsize < 4 else jnp.dtype(dtype)


def weights_dtype(dtype, score: str):
    """The dtype in which weights multiply values of a dtype: its own, or float32 for float16 under a score that is not
    normalised, whose weights may exceed float16's 65,504 where outputs do not."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 and score != "softmax" else jnp.dtype(dtype)


def soft_cap(logits, cap: float):
    """cap tanh(logits / cap): close to the logits where they are small, never beyond +-cap (arXiv:2408.00118, 2)."""
    return cap * jnp.tanh(logits * (1.0 / cap))


def soft_cap_slope(capped, cap: float):
    """The derivative of `soft_cap`, from its result; 0 for the constant of masked scores."""
    return jnp.maximum(1.0 - jnp.square(capped * (1.0 / cap)), 0.0)


def elementwise_weights(logits, mask, score: Score):
    """relu2 or laplace of the logits, 0 where `mask` (bool, broadcastable, or None) is False."""
    weights = scores.elementwise_weights(score, logits)
    return weights if mask is None else jnp.where(mask, weights, jnp.zeros((), weights.dtype))


def seen_with_bias(bias):
    """Where a bias does not hide its key: -inf does, and so does the lowest finite float32 or bfloat16, beside which
    the score of a masked key would be the larger one."""
    return ~(bias <= MASKED / 2)


def hide_infinite_bias(bias, mask):
    """The mask, in which a bias of -inf hides a key too, so that rows with no other keys give 0 and not NaN."""
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
