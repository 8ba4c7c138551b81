"""Compression of a history into a few tokens, by differential cross-attention.

BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl), equations 11 and 12.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.compressed import gpu, tpu, xla
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import Form, without_kept
from brl_jax.attention.core.checks import (
    check_bias_shape,
    check_floating,
    check_lengths,
    check_qkv,
    check_scale,
    check_within,
    require,
    zero_hidden,
)
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation, dispatch
from brl_jax.attention.core.on_mesh import Cut
from brl_jax.attention.core.scores import (
    Score,
    accumulation_dtype,
    attention_weights,
    check_score,
    hide_infinite_bias,
    weights_dtype,
)
from brl_jax.attention.core.varying import vary_like
from brl_jax.sharding import sequence_axis
from pallas_kernels.absent import existing

# Longer histories are read in pieces, except on GPUs, so that the (M, S) logits never all exist at once.
_WHOLE = 4096


def check_readers(
    query: Any, key: Array, contrast_key: Array | None, value: Array, gamma: Any, score: Score
) -> None:
    """Raises ValueError unless compressed tokens (B, M, N, H), or their ShapeDtypeStruct, fit what they read."""
    check_qkv(query, key, value)
    check_floating(query=query, key=key, value=value)
    check_score(score)
    heads = query.shape[2]
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
        check_floating(query=query, contrast_key=contrast_key)


def _cut(*_: Any, key: Array, **__: Any) -> Cut:
    axis = sequence_axis(key.shape[1])
    return Cut() if axis is None else Cut({"S": "length"}, {"axis_name": axis})


@divided(_cut)
def compress(
    query: Float[Array, "B M N H"],
    key: Float[Array, "B S N H"],
    contrast_key: Float[Array, "B S N H"] | None,
    value: Float[Array, "B S N V"],
    *,
    gamma: Float[Array, "N"] | float | None,
    scale: float | None = None,
    score: Score = "softmax",
    bias: Float[Array, "#B #N #M #S"] | PositionBias | None = None,
    mask: Bool[Array, "#B #N #M #S"] | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    axis_name: str | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B M N V"]:
    """Compresses S tokens into M with the difference of two attentions (BRL-Attention, OpenReview Vpyg3fqXbl, eq. 12).

    (B, M, N, H), (B, S, N, H) x 2, (B, S, N, V) -> (B, M, N, V)::

        out = compress(query, key, contrast_key, value, gamma=0.1)

    Per head: out = (sigma(c Q K1^T + b) - gamma sigma(c Q K2^T + b)) V, with Q from the compressed tokens and K1
    (`key`), K2 (`contrast_key`) and V from the history. Takes O(S M) time and O(S + M) memory: histories of more than
    4096 keys are read in pieces, up to the longest of `key_value_seq_lengths`. On a GPU without the kernel they are
    read at once, with M S logits for each head.

    Args:
      query: (B, M, N, H), float32, bfloat16 or float16 (float64 with jax_enable_x64).
      key, contrast_key: (B, S, N, H). `contrast_key=None` with `gamma=None` omits the second attention.
      value: (B, S, N, V).
      gamma: (N,) or a number, the weight of the second attention.
      scale: c; by default 1 / (M sqrt(H)), modification M1 of the paper.
      score: "softmax", "relu2" or "laplace"; the last two are not normalised.
      bias: added to both logits; an array broadcastable to (B, N, M, S), or a `PositionBias` called with the
        compressed tokens' indices 0..M-1 and the keys' 0..S-1.
      mask: bool, broadcastable to (B, N, M, S); False hides a key.
      key_value_seq_lengths: (B,), how many of the S keys exist; later ones are padding.
      axis_name: inside `jax.shard_map`, the mesh axis that shards histories in equal parts. S counts this device's
        keys; query and result are the same on all devices, which merge their softmaxes (one pmax and two psums).
        Lengths and the positions for a `PositionBias` refer to whole histories; an array bias or mask covers this
        device's keys.
      implementation: None picks by platform when the call is lowered; "xla" works everywhere; "pallas" is a TPU kernel,
        "triton" a GPU kernel, and "pallas_interpret" and "triton_interpret" interpret them.

    Returns:
      (B, M, N, V) in query's dtype, summed in float32. Rows that see no key give 0.

    Raises:
      ValueError: arguments do not fit together.
      NotImplementedError: the named kernel does not support the call or the platform.
    """
    check_readers(query, key, contrast_key, value, gamma, score)
    batch, num_queries, heads, _ = query.shape
    length = key.shape[1]
    if gamma is not None:
        gamma = per_head(gamma, query)
    scale = check_compress_scale(scale, query)

    key_value_seq_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    if axis_name is None:
        check_within("key_value_seq_lengths", key_value_seq_lengths, length)
    if mask is not None:
        full = (batch, heads, num_queries, length)
        fits = mask.ndim == 4 and all(size in (1, most) for size, most in zip(mask.shape, full))
        require(
            fits and mask.dtype == jnp.bool_,
            f"mask must be bool and broadcast to (B, N, M, S) = {full}, got {mask.dtype} of shape {mask.shape}",
        )
    first: Any = 0
    if axis_name is not None:
        try:
            first = jax.lax.axis_index(axis_name) * length
        except NameError as error:
            raise ValueError(
                f"axis_name must be an axis of a shard_map around the call, got {axis_name!r}"
            ) from error
        if key_value_seq_lengths is not None:
            key_value_seq_lengths = jnp.clip(key_value_seq_lengths - first, 0, length)
    if isinstance(bias, PositionBias):
        bias = bias(jnp.arange(num_queries), first + jnp.arange(length))[None]
    if bias is not None:
        check_bias_shape(bias, (batch, heads, num_queries, length), "(B, N, M, S)")

    operands = (query, key, contrast_key, value, gamma, bias, mask, key_value_seq_lengths)
    static = {"scale": scale, "score": score, "axis_name": axis_name}
    return _choose(*operands, **static, implementation=implementation)


def check_compress_scale(scale: float | None, query: Float[Array, "*B M N H"]) -> float:
    """The scale, by default the paper's 1 / (m sqrt(h)); raises ValueError unless it is finite."""
    if scale is None:
        return 1.0 / (query.shape[-3] * math.sqrt(query.shape[-1]))
    return check_scale(scale, query.shape[-1])


def per_head(gamma, query):
    """Broadcasts a number or an array (N,) to (N,), in the dtype of sums."""
    heads = query.shape[-2]
    gamma = jnp.asarray(gamma, accumulation_dtype(query.dtype))
    require(gamma.shape in ((), (heads,)), f"gamma must have shape ({heads},) or (), got {gamma.shape}")
    return jnp.broadcast_to(gamma, (heads,))


# Compiled on its own, so that calls outside jit are traced once.
@functools.partial(jax.jit, static_argnames=("scale", "score", "axis_name", "implementation"))
def _choose(query, key, contrast_key, value, gamma, bias, mask, lengths, *, implementation, **static):
    operands = (query, key, contrast_key, value, gamma, bias, mask, lengths)
    backends = {
        "tpu": [tpu.compress_backend(**static)],
        "cuda": [gpu.compress_backend(**static)],
    }
    plain = functools.partial(_short, scale=static["scale"], score=static["score"])
    forms, length = {"default": without_kept(plain)}, key.shape[1]
    if length > _WHOLE or static["axis_name"] is not None:
        piece = xla.piece_size(query.shape[1], length)
        plain = functools.partial(_long, {"piece": piece, **static})
        # With pieces, a GPU would wait for kernel launches. All (M, S) logits at once are still linear in S.
        at_once = _in_pieces(length, **static)
        forms = {"default": _in_pieces(piece, **static), "cuda": at_once, "rocm": at_once}
    return dispatch(
        "compress",
        implementation,
        backends,
        plain,
        *operands,
        forms=forms,
        results=jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
        kept=xla.kept_shapes(query, value, gamma is not None, static["score"]),
        axis_name=static["axis_name"],
    )


def _short(query, key, contrast_key, value, gamma, bias, mask, lengths, *, scale, score):
    """All keys at once."""
    if lengths is not None:
        exists = existing(lengths, key.shape[1])[:, None, None, :]
        mask = exists if mask is None else mask & exists
    if mask is not None:
        key, contrast_key, value = zero_hidden(mask, key, contrast_key, value)
    whole = functools.partial(_whole, scale=scale, score=score)
    return jax.checkpoint(whole)(query, key, contrast_key, value, gamma, bias, mask)


def _long(options, query, key, contrast_key, value, gamma, bias, mask, lengths):
    """The keys in pieces, in operations that JAX differentiates."""
    outs = xla.plain_read(_for_pieces(query, key, contrast_key, value, bias, mask, lengths), **options)
    return difference(outs, gamma, query.dtype)


def _for_pieces(query, key, contrast_key, value, bias, mask, lengths) -> xla.Operands:
    keys = (key,) if contrast_key is None else (key, contrast_key)
    return xla.Operands(query, keys, value, bias, mask, lengths)


def difference(outs, gamma, dtype):
    """The first attention's output minus gamma times the second's, (..., N, V)."""
    if gamma is None:
        return outs[0].astype(dtype)
    each_head = gamma.reshape((1,) * (outs[1].ndim - 2) + (-1, 1))
    return (outs[0] - each_head * outs[1]).astype(dtype)


def _in_pieces(piece: int, *, scale: float, score: Score, axis_name: str | None) -> Form:
    """The form that keeps the outputs and log-sum-exps of both attentions."""

    def run(query, key, contrast_key, value, gamma, bias, mask, lengths):
        x = _for_pieces(query, key, contrast_key, value, bias, mask, lengths)
        outs, log_sums = xla.forward(vary_like(x, x), piece, scale, score, axis_name)
        return difference(outs, gamma, query.dtype), (outs, log_sums)

    def gradient(operands, result, kept, d_out):
        query, key, contrast_key, value, gamma, bias, mask, lengths = operands
        x = _for_pieces(query, key, contrast_key, value, bias, mask, lengths)
        # All devices share the query, and each computes a part of its gradient; the parts are summed.
        _, shared = jax.vjp(lambda *shared: vary_like(shared, x), query, bias)
        outs, log_sums = kept
        _, pull = jax.vjp(lambda outs, gamma: difference(outs, gamma, query.dtype), outs, gamma)
        d_outs, d_gamma = pull(d_out)
        if axis_name is not None and axis_name not in jax.typeof(key).manual_axis_type.varying:
            # Without shard_map's check_vma, each device gets a part of the gradient of the shared result.
            d_outs = jax.lax.psum(d_outs, axis_name)
        d = xla.backward(vary_like(x, x), outs, log_sums, d_outs, piece, scale, score)
        d_query, d_bias = shared((d.query, d.bias))
        d_key, d_contrast_key = (*d.keys, None)[:2]
        return d_query, d_key, d_contrast_key, d.value, d_gamma, d_bias, None, None

    return Form(run, gradient)


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
    """The weights S1 - gamma S2 that `compress` gives to the values, (B, N, M, S), for inspection (eq. 12).

    Arguments as for `compress`. All logits exist at once.
    """
    scale = check_compress_scale(scale, query)
    return _weights(query, key, contrast_key, gamma, bias, mask, scale=scale, score=score)


def _logits(query, key, bias, scale):
    accumulate = accumulation_dtype(query.dtype)
    logits = jnp.einsum("bmnh,bsnh->bnms", query, key, preferred_element_type=accumulate)
    logits = logits * jnp.asarray(scale, accumulate)
    return logits if bias is None else logits + bias.astype(accumulate)


def _read(weights, value, score):
    accumulate, kept = accumulation_dtype(value.dtype), weights_dtype(value.dtype, score)
    return jnp.einsum(
        "bnms,bsnh->bmnh", weights.astype(kept), value.astype(kept), preferred_element_type=accumulate
    )


def _weights(query, key, contrast_key, gamma, bias, mask, *, scale, score):
    mask = hide_infinite_bias(bias, mask)
    weights = attention_weights(_logits(query, key, bias, scale), mask, score)
    if contrast_key is None:
        return weights
    contrast = attention_weights(_logits(query, contrast_key, bias, scale), mask, score)
    gamma = jnp.broadcast_to(jnp.asarray(gamma, weights.dtype), (query.shape[2],))
    return weights - gamma[None, :, None, None] * contrast


def _whole(query, key, contrast_key, value, gamma, bias, mask, *, scale, score):
    weights = _weights(query, key, contrast_key, gamma, bias, mask, scale=scale, score=score)
    return _read(weights, value, score).astype(query.dtype)
