"""Compression of a history into a few tokens: differential cross-attention (BRL-Attention, eqs. 11-12)."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.bias import PositionBias
from brl_jax.attention.checks import check_qkv, require
from brl_jax.attention.kernels import bias_obstacle, dispatch
from brl_jax.attention.scores import (
    Score,
    accumulation_dtype,
    attention_weights,
    check_score,
    elementwise_weights,
)
from brl_jax.attention.varying import vary_like

# Longer histories are read in pieces of this many keys, so that the (M, S) logits never exist at once.
_CHUNK = 4096


def compress(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N H"],
    *,
    gamma: Float[Array, "N"] | float | None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #M #S"] | PositionBias | None = None,
    mask: Bool[Array, "#B #N #M #S"] | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    implementation: Literal["xla", "pallas"] | None = None,
) -> Float[Array, "B M N H"]:
    """Reads S tokens into M with the difference of two attentions (BRL-Attention, eq. 12).

    Per head: out = (sigma(c Q K1^T + b) - gamma sigma(c Q K2^T + b)) V, with Q from the compressed tokens and K1
    (`key`), K2 (`contrast_key`) and V from the history. Time is O(S M) and memory O(S + M): histories beyond 4096
    keys are read in pieces whose softmaxes are merged by their log-sum-exp.

    Args:
      query: (B, M, N, H), float32 or bfloat16 (float64 with jax_enable_x64).
      key, contrast_key, value: (B, S, N, H). `contrast_key=None` with `gamma=None` leaves the second attention out.
      gamma: (N,) or a number, the weight of the second attention.
      scale: c; by default 1 / (M sqrt(H)), modification M1 of the paper.
      score: "softmax", "relu2" or "laplace"; the last two are not normalised.
      bias: added to both logits; an array broadcastable to (B, N, M, S), or a `PositionBias` called with the
        compressed tokens' indices 0..M-1 and the keys' 0..S-1.
      mask: bool, broadcastable to (B, N, M, S); False hides a key.
      key_value_seq_lengths: (B,), how many of the S keys exist; what lies beyond is never read into the result.
      implementation: None picks by platform at lowering time, "xla" works everywhere, "pallas" is a TPU kernel.

    Returns:
      (B, M, N, H) in the dtype of query. Rows that see no key give 0. Sums are kept in float32.

    Raises:
      ValueError: on shapes that don't fit, an unknown score, or gamma given without contrast_key (or the reverse).
      NotImplementedError: if `implementation="pallas"` cannot serve the request.
    """
    check_qkv(query, key, value)
    check_score(score)
    batch, num_queries, heads, head_dim = query.shape
    length = key.shape[1]
    require(key.shape[2] == heads, f"key must have query's {heads} heads, got {key.shape[2]}")
    require(
        (contrast_key is None) == (gamma is None),
        "gamma and contrast_key belong together: give both, or None for both to use a single attention",
    )
    if contrast_key is not None:
        require(
            contrast_key.shape == key.shape,
            f"contrast_key must have key's shape {key.shape}, got {contrast_key.shape}",
        )
        gamma = per_head(gamma, query)
    if scale is None:
        scale = 1.0 / (num_queries * math.sqrt(head_dim))

    if key_value_seq_lengths is not None:
        require(
            key_value_seq_lengths.shape == (batch,),
            f"key_value_seq_lengths must have shape ({batch},), got {key_value_seq_lengths.shape}",
        )
    if mask is not None:
        require(mask.ndim == 4, f"mask must have 4 axes (B, N, M, S), got shape {mask.shape}")
    if isinstance(bias, PositionBias):
        bias = bias(jnp.arange(num_queries), jnp.arange(length))[None]
    if bias is not None:
        require(bias.ndim == 4, f"bias must have 4 axes (B, N, M, S), got shape {bias.shape}")

    operands = (query, key, contrast_key, value, gamma, bias, mask, key_value_seq_lengths)
    return _choose(*operands, scale=float(scale), score=score, implementation=implementation)


def per_head(gamma, query):
    """A number or (N,) as (N,), in the dtype that sums are kept in."""
    heads = query.shape[-2]
    gamma = jnp.asarray(gamma, accumulation_dtype(query.dtype))
    require(gamma.shape in ((), (heads,)), f"gamma must have shape ({heads},) or (), got {gamma.shape}")
    return jnp.broadcast_to(gamma, (heads,))


# Compiled by itself, so that a call outside jit traces the kernel once and not every time.
@functools.partial(jax.jit, static_argnames=("scale", "score", "implementation"))
def _choose(query, key, contrast_key, value, gamma, bias, mask, lengths, *, scale, score, implementation):
    def kernel(query, key, contrast_key, value, gamma, bias, mask, lengths, *, interpret):
        from pallas_kernels import tpu  # imported where needed: Pallas costs import time

        return tpu.compress(
            query, key, contrast_key, value, gamma=gamma, scale=scale, score=score, key_lengths=lengths,
            interpret=interpret,
        )  # fmt: skip

    obstacle = bias_obstacle(bias) if mask is None else "mask must be None, got an array"
    xla = functools.partial(_compress, scale=scale, score=score)
    operands = (query, key, contrast_key, value, gamma, bias, mask, lengths)
    return dispatch("compress", implementation, obstacle, kernel, xla, *operands)


def _compress(query, key, contrast_key, value, gamma, bias, mask, lengths, *, scale, score):
    length = key.shape[1]
    if lengths is not None:
        exists = (jnp.arange(length)[None, :] < lengths[:, None])[:, None, None, :]
        mask = exists if mask is None else mask & exists
    if mask is not None:
        # A key nobody sees may hold anything, NaN included: it must reach neither the sum nor the gradient.
        seen = jnp.any(mask, axis=(1, 2))[:, :, None, None]
        key, value = (jnp.where(seen, a, jnp.zeros((), a.dtype)) for a in (key, value))
        if contrast_key is not None:
            contrast_key = jnp.where(seen, contrast_key, jnp.zeros((), contrast_key.dtype))
    if length <= _CHUNK:
        whole = functools.partial(_whole, scale=scale, score=score)
        return jax.checkpoint(whole)(query, key, contrast_key, value, gamma, bias, mask)
    return _pieces(query, key, contrast_key, value, gamma, bias, mask, scale=scale, score=score)


def compress_weights(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    *,
    gamma: Float[Array, "N"] | float | None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #M #S"] | None = None,
    mask: Bool[Array, "#B #N #M #S"] | None = None,
) -> Float[Array, "B N M S"]:
    """The weights S1 - gamma S2 that `compress` gives to the values, for looking at: (B, N, M, S), as in eq. 12.

    Arguments as for `compress`; all logits exist at once.
    """
    if scale is None:
        scale = 1.0 / (query.shape[1] * math.sqrt(query.shape[3]))
    return _weights(query, key, contrast_key, gamma, bias, mask, scale=scale, score=score)


def _logits(query, key, bias, scale):
    accumulate = accumulation_dtype(query.dtype)
    logits = jnp.einsum("bmnh,bsnh->bnms", query, key, preferred_element_type=accumulate)
    logits = logits * jnp.asarray(scale, accumulate)
    return logits if bias is None else logits + bias.astype(accumulate)


def _read(weights, value):
    accumulate = accumulation_dtype(value.dtype)
    return jnp.einsum(
        "bnms,bsnh->bmnh", weights.astype(value.dtype), value, preferred_element_type=accumulate
    )


def _weights(query, key, contrast_key, gamma, bias, mask, *, scale, score):
    weights = attention_weights(_logits(query, key, bias, scale), mask, score)
    if contrast_key is None:
        return weights
    contrast = attention_weights(_logits(query, contrast_key, bias, scale), mask, score)
    gamma = jnp.broadcast_to(jnp.asarray(gamma, weights.dtype), (query.shape[2],))
    return weights - gamma[None, :, None, None] * contrast


def _whole(query, key, contrast_key, value, gamma, bias, mask, *, scale, score):
    weights = _weights(query, key, contrast_key, gamma, bias, mask, scale=scale, score=score)
    return _read(weights, value).astype(query.dtype)


def _pieces(query, key, contrast_key, value, gamma, bias, mask, *, scale, score):
    """The same by a scan over pieces of the history, each kept only while it is read."""
    batch, num_queries, heads, head_dim = query.shape
    length = key.shape[1]
    count = -(-length // _CHUNK)
    padded = count * _CHUNK
    if mask is None:
        mask = jnp.ones((1, 1, 1, length), bool)
    mask = jnp.broadcast_to(mask, (*mask.shape[:3], length))

    def split_keys(array):
        if array is None:
            return None
        array = jnp.pad(array, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
        return rearrange(array, "b (c s) n h -> c b s n h", c=count)

    def split_last(array):
        if array is None or array.shape[-1] == 1:
            return None
        array = jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, padded - length)))
        return rearrange(array, "b n m (c s) -> c b n m s", c=count)

    whole_bias = bias if bias is not None and bias.shape[-1] == 1 else None
    keys = [key] if contrast_key is None else [key, contrast_key]
    accumulate = accumulation_dtype(query.dtype)
    state_shape = (batch, heads, num_queries)

    def start():
        return (
            jnp.full(state_shape, -jnp.inf, accumulate),
            jnp.zeros(state_shape, accumulate),
            jnp.zeros((batch, num_queries, heads, head_dim), accumulate),
        )

    @jax.checkpoint
    def piece(states, xs):
        piece_keys, piece_value, piece_bias, piece_mask = xs
        piece_bias = whole_bias if piece_bias is None else piece_bias
        return tuple(
            _accumulate(state, _logits(query, k, piece_bias, scale), piece_mask, piece_value, score)
            for state, k in zip(states, piece_keys)
        ), None

    xs = ([split_keys(k) for k in keys], split_keys(value), split_last(bias), split_last(mask))
    states, _ = jax.lax.scan(piece, vary_like(tuple(start() for _ in keys), (query, xs)), xs)
    outs = [_finish(state, score) for state in states]
    out = outs[0] if contrast_key is None else outs[0] - gamma[None, None, :, None] * outs[1]
    return out.astype(query.dtype)


def _accumulate(state, logits, mask, value, score: Score):
    """One piece of an online softmax (or a plain sum): state is (running maximum, normaliser, weighted sum)."""
    maximum, normaliser, total = state
    if score != "softmax":
        return maximum, normaliser, total + _read(elementwise_weights(logits, mask, score), value)
    logits = jnp.where(mask, logits, -jnp.inf)
    new_maximum = jnp.maximum(maximum, jax.lax.stop_gradient(logits.max(axis=-1)))
    # While no key has been seen the maximum is -inf: 0 stands in, so that -inf - -inf never happens.
    safe = jnp.where(jnp.isneginf(new_maximum), jnp.zeros((), logits.dtype), new_maximum)
    weights = jnp.exp(logits - safe[..., None])
    decay = jnp.exp(jnp.where(jnp.isneginf(maximum), -jnp.inf, maximum - safe))
    normaliser = normaliser * decay + weights.sum(axis=-1)
    total = total * rearrange(decay, "b n m -> b m n 1") + _read(weights, value)
    return new_maximum, normaliser, total


def _finish(state, score: Score):
    _, normaliser, total = state
    if score != "softmax":
        return total
    normaliser = rearrange(normaliser, "b n m -> b m n 1")
    return total / jnp.where(normaliser == 0, jnp.ones((), normaliser.dtype), normaliser)
