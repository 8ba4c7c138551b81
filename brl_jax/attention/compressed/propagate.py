"""Propagation of compressed tokens back to all tokens, by cross-attention on M keys.

BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), equations 8 and 9.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from brl_jax.attention.compressed import gpu, tpu
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import without_kept
from brl_jax.attention.core.checks import check_bias_shape, check_floating, check_qkv, check_scale, require
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation, dispatch
from brl_jax.attention.core.on_mesh import Cut
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.core.scores import (
    Score,
    accumulation_dtype,
    attention_weights,
    check_score,
    hide_infinite_bias,
    weights_dtype,
)
from brl_jax.sharding import sequence_axis

# Queries in a block on a CPU, so that their weights stay in cache.
_CHUNK = 512


def _cut(*_: Any, query: Array, bias: Any, **__: Any) -> Cut:
    # A `PositionBias` counts from the first token.
    cuts = not isinstance(bias, PositionBias) and sequence_axis(query.shape[1]) is not None
    return Cut({"T": "length"} if cuts else {})


@divided(_cut)
def propagate(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B M N H"],
    value: Float[Array, "B M N V"],
    *,
    strength: Float[Array, "N"] | float,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #T #M"] | PositionBias | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Lets T tokens read M compressed tokens: out = lambda sigma(c z_Q z_K^T + b) z_V.

    (B, T, N, H), (B, M, N, H), (B, M, N, V) -> (B, T, N, V)::

        out = propagate(query, key, value, strength=0.5)

    BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), eq. 9. Time and memory are O(T M). The backward pass recomputes
    the weights.

    Args:
      query: (B, T, N, H), z_Q = phi(x), float32, bfloat16 or float16 (float64 with jax_enable_x64).
      key, value: (B, M, N, H) and (B, M, N, V), linear in the compressed tokens.
      strength: (N,) or a number, lambda.
      scale: c; by default 1 / sqrt(H).
      score: "softmax", "relu2" or "laplace".
      bias: added to the logits; an array broadcastable to (B, N, T, M), or a `PositionBias` called with 0..T-1 and
        the compressed tokens' indices 0..M-1.
      implementation: None picks by platform when the call is lowered; "xla" works everywhere; "pallas" is a TPU kernel,
        "triton" a GPU kernel, and "pallas_interpret" and "triton_interpret" interpret them.

    Returns:
      (B, T, N, V) in query's dtype.

    Raises:
      ValueError: arguments do not fit together.
      NotImplementedError: the named kernel does not support the call or the platform.
    """
    check_qkv(query, key, value)
    check_floating(query=query, key=key, value=value)
    check_score(score)
    _, length, heads, head_dim = query.shape
    require(key.shape[2] == heads, f"key must have query's {heads} heads, got {key.shape[2]}")
    accumulate = accumulation_dtype(query.dtype)
    strength = jnp.asarray(strength, accumulate)
    require(
        strength.shape in ((), (heads,)), f"strength must have shape ({heads},) or (), got {strength.shape}"
    )
    strength = jnp.broadcast_to(strength, (heads,))
    if isinstance(bias, PositionBias):
        bias = bias(jnp.arange(length), jnp.arange(key.shape[1]))[None]
    if bias is not None:
        check_bias_shape(bias, (query.shape[0], heads, length, key.shape[1]), "(B, N, T, M)")
    scale = check_scale(scale, head_dim)
    operands = (query, key, value, strength, bias)
    return _choose(*operands, scale=scale, score=score, implementation=implementation)


def _cut_blocks(*_: Any, query: Array, key: Array, **__: Any) -> Cut:
    length, blocks = query.shape[1], key.shape[1]
    if sequence_axis(length, length // blocks if blocks > 1 else 1) is None:
        return Cut()
    return Cut({"T": "length", "C": "blocks"} if blocks > 1 else {"T": "length", "t": "length"})


@divided(_cut_blocks)
def propagate_blocks(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B C M N H"],
    value: Float[Array, "B C M N V"],
    *,
    strength: Float[Array, "N"],
    score: Score = "softmax",
    bias: Float[Array, "#B #N t #M"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """`propagate` for C blocks of t = T / C tokens, each of which reads its own compressed tokens."""
    out = propagate(
        *merge_blocks(query, key), merge_blocks(query, value)[1],
        strength=strength, score=score, bias=bias, implementation=implementation,
    )  # fmt: skip
    return out.reshape(*query.shape[:3], value.shape[4])


def merge_blocks(query: Float[Array, "B T N H"], offered: Float[Array, "B C M N H"]) -> tuple[Array, Array]:
    """Reshapes blocks to rows of a batch: their tokens (B C, T / C, N, H) and their offers (B C, M, N, H)."""
    query = rearrange(query, "b (c t) n h -> (b c) t n h", c=offered.shape[1])
    return query, rearrange(offered, "b c m n h -> (b c) m n h")


# Compiled on its own, so that calls outside jit are traced once.
@functools.partial(jax.jit, static_argnames=("scale", "score", "implementation"))
def _choose(query, key, value, strength, bias, *, scale, score, implementation):
    rows = functools.partial(_rows, scale=scale, score=score)
    whole = jax.checkpoint(rows)

    def in_blocks(query, key, value, strength, bias):
        return by_query_blocks(lambda q, *_: rows(q, key, value, strength, None), _CHUNK, query)

    xla = {"default": without_kept(whole)}
    if query.shape[1] > _CHUNK and bias is None:
        xla["cpu"] = without_kept(in_blocks)

    backends = {
        "tpu": [tpu.propagate_backend(scale=scale, score=score)],
        "cuda": [gpu.propagate_backend(scale=scale, score=score)],
    }
    operands = (query, key, value, strength, bias)
    results = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype)
    return dispatch("propagate", implementation, backends, whole, *operands, forms=xla, results=results)


def propagate_weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B M N H"],
    *,
    strength: Float[Array, "N"] | float,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #T #M"] | None = None,
) -> Float[Array, "B N T M"]:
    """The weights lambda sigma(...) that `propagate` gives to the values, (B, N, T, M), for inspection."""
    accumulate = accumulation_dtype(query.dtype)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[3])
    logits = jnp.einsum("btnh,bmnh->bntm", query, key, preferred_element_type=accumulate)
    logits = logits * jnp.asarray(scale, accumulate)
    if bias is not None:
        logits = logits + bias.astype(accumulate)
    strength = jnp.broadcast_to(jnp.asarray(strength, accumulate), (query.shape[2],))
    return attention_weights(logits, hide_infinite_bias(bias, None), score) * strength[None, :, None, None]


def _rows(query, key, value, strength, bias, *, scale, score):
    accumulate = accumulation_dtype(query.dtype)
    weights = propagate_weights(query, key, strength=strength, scale=scale, score=score, bias=bias)
    kept = weights_dtype(value.dtype, score)
    out = jnp.einsum(
        "bntm,bmnh->btnh", weights.astype(kept), value.astype(kept), preferred_element_type=accumulate
    )
    return out.astype(query.dtype)
