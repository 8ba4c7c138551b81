"""The plain meaning of this family's functions; the tests compare them with the functions of the same names."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from brl_jax.attention.sorting.prob_sparse import sampled_fractions


def prob_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    rng: PRNGKeyArray,
    factor: int = 5,
    scale: float | None = None,
    is_causal: bool = False,
) -> Float[Array, "B T N V"]:
    """The queries whose sampled scores have the largest maximum minus mean attend (arXiv:2012.07436, algorithm 1).

    A causal query is ranked among the queries up to its own. Runs outside of `jax.jit`.
    """
    length, heads = query.shape[1:3]
    key, value = (jnp.repeat(x, heads // key.shape[2], axis=2) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale

    def logarithm(n: int) -> int:
        return max(1, math.ceil(math.log(n)))

    sees = [t + 1 if is_causal else length for t in range(length)]
    budgets = [min(n, factor * logarithm(n)) for n in sees]
    draws = jnp.stack([sampled_fractions(rng, jnp.arange(length), s) for s in range(max(budgets))], 1)
    scores = np.asarray(jnp.einsum("btnh,bsnh->bnts", query, key))
    measures = np.zeros(scores.shape[:3])
    for t, (n, u) in enumerate(zip(sees, budgets)):
        sampled = scores[:, :, t, np.floor(np.asarray(draws)[t, :u] * n).astype(int)]
        measures[:, :, t] = sampled.max(-1) - sampled.mean(-1)
    attends = np.zeros(measures.shape, bool)
    for t, (n, u) in enumerate(zip(sees, budgets)):
        others = measures[:, :, :t] if is_causal else measures
        above = (others >= measures[:, :, t, None]).sum(-1) - (0 if is_causal else 1)
        attends[:, :, t] = above < u
        if is_causal:
            attends[:, :, t] &= attends[:, :, :t].sum(-1) < 2 * u * logarithm(n)
    visible = jnp.tril(jnp.ones((length, length), bool)) if is_causal else jnp.ones((length, length), bool)
    weights = jax.nn.softmax(jnp.asarray(scores) * scale, -1, where=visible[None, None])
    uniform = visible.astype(jnp.float32) / (1 if is_causal else length)
    weights = jnp.where(attends[..., None], weights, uniform[None, None])
    return jnp.einsum("bnts,bsnv->btnv", weights, value)
