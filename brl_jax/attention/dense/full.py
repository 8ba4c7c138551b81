"""Full softmax attention of every query to every key, by XLA or by cuDNN."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.arguments import (
    check_bias,
    check_dtypes,
    check_lengths,
    check_mask,
    check_scale,
    check_segments,
    check_sinks,
    check_soft_cap,
    is_int,
    zero_padding,
)
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.boundary import attention_function, batch_optional
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.cudnn import obstacle_of_cudnn
from brl_jax.attention.core.derivatives import differentiable
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.scores import soft_cap
from brl_jax.attention.core.softmax import MASKED


@overload
def full_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    query_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> Array: ...  # fmt: skip


@overload
def full_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    query_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


@batch_optional
@attention_function
def full_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: PositionBias | Float[Array, " ..."] | None = None,
    mask: Bool[Array, " ..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Softmax attention over all keys (Vaswani et al. 2017, eq. 1); O(T S) time and, without cuDNN, memory.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = full_attention(query, key, value, is_causal=True)

    It differs from `jax.nn.dot_product_attention` in special cases: a query that sees no key gives 0 and zero gradients
    instead of the mean of all values, padding may contain NaN, the residual has gradients, and queries may be at an
    offset, as in generation with a cache. `reference.full_attention` is the plain form.

    As there, query, key and value may all lack the batch axis: (T, N, H), (S, K, H) and (S, K, V). Then bias and mask
    broadcast to (N, T, S), segment ids are (T,), or (T,) and (S,), lengths have the shape () or (1,), and the results
    lack the axis too.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key: (B, S, K, H) of the same dtype; K divides N.
      value: (B, S, K, V) of the same dtype.
      bias: added to the scaled scores: a `PositionBias` (called on all positions: an (N, T, S) array) or an
        array that broadcasts to (B, N, T, S). Both receive gradients. A query does not see a key with a bias of -inf.
      mask: bools that broadcast to (B, N, T, S); a query sees only keys where it is True.
      scale: the scale of the scores; 1 / sqrt(H) by default.
      is_causal: query i sees keys up to index i + query_offset only.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; rows and keys at and after the length are
        padding. Padded rows give 0.
      segment_ids: (B, T) ints where T = S, or a pair (B, T), (B, S): a query sees the keys with its id only.
      query_offset: query i has the position of key i + query_offset; an int or a traced int scalar.
      sinks: for each query head a logit that takes part in the softmax and has no value, so that the weights of the
        keys add up to less than 1: p_ij = exp(score_ij) / (exp(sink) + sum_j exp(score_ij)), as in gpt-oss
        (arXiv:2508.10925). Sinks are neither scaled nor capped, and get gradients.
      logits_soft_cap: a positive number c. The scaled scores become c tanh(scale q . k / c) before bias and mask, as
        in Gemma 2 (arXiv:2408.00118, section 2).
      implementation: None selects cuDNN when lowered for an NVIDIA GPU, if cuDNN is installed and supports the call,
        and XLA otherwise; "xla" works everywhere; "cudnn" raises if it does not support the call.
      return_residual: also return the log-sum-exp of each query's scores, with bias, soft cap and sinks in them. cuDNN
        does not serve it.

    Returns:
      (B, T, N, V) in the dtype of the query. The softmax is computed in float32. With return_residual a pair of it and
      the log-sum-exp, (B, T, N) in the dtype of the query, -inf or its sink for a query that sees no key.

    Raises:
      ValueError: shapes, dtypes or an implementation that do not fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    scale = check_scale(scale, query.shape[3])
    bias = check_bias(bias, query, key)
    mask = check_mask(mask, query, key)
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    segments = check_segments(segment_ids, query.shape, key.shape)
    is_scalar = isinstance(query_offset, jax.Array) and query_offset.shape == ()
    require(
        is_int(query_offset) or (is_scalar and jnp.issubdtype(jnp.result_type(query_offset), jnp.integer)),
        f"query_offset must be an int or an int scalar array, got {query_offset!r}",
    )
    require(
        implementation in (None, "xla", "cudnn"),
        f"implementation must be None, 'xla' or 'cudnn', got {implementation!r}",
    )
    sinks = check_sinks(sinks, query.shape[2])
    cap = check_soft_cap(logits_soft_cap)
    missing = _missing_for_cudnn(
        query, value, bias, mask, segments, query_offset, is_causal, sinks, cap, return_residual
    )
    query_offset = jnp.asarray(query_offset, jnp.int32)
    arguments = (query, key, value, bias, mask, query_lengths, key_lengths, segments, query_offset, sinks)
    with_xla = functools.partial(
        _with_xla, scale=scale, is_causal=is_causal, cap=cap, return_residual=return_residual
    )
    if implementation == "xla":
        return with_xla(*arguments)

    through_cudnn = functools.partial(_through_cudnn, *arguments, scale=scale, is_causal=is_causal)
    if implementation == "cudnn":
        require(
            not missing, f"implementation='cudnn' serves full attention only with {'; with '.join(missing)}"
        )
        return through_cudnn(everywhere=True)
    # XLA takes calls with lengths, because it is not specified what cuDNN writes to rows without a visible key.
    if (
        missing
        or query_lengths is not None
        or key_lengths is not None
        or obstacle_of_cudnn(functools.partial(_with_cudnn, scale=scale, is_causal=is_causal), *arguments)
        is not None
    ):
        return with_xla(*arguments)
    return through_cudnn(everywhere=False)


# Compiled on its own, so that gradients outside jit are traced once and not every time.
@functools.partial(jax.jit, static_argnames=("scale", "is_causal", "everywhere"))
def _through_cudnn(*arguments, scale, is_causal, everywhere):
    """By cuDNN, on a GPU or `everywhere`: a call without sinks, soft cap and residual (`_missing_for_cudnn`)."""
    with_cudnn = functools.partial(_with_cudnn, scale=scale, is_causal=is_causal)
    with_xla = functools.partial(_with_xla, scale=scale, is_causal=is_causal, cap=None, return_residual=False)
    on_gpus = functools.partial(lax.platform_dependent, cuda=with_cudnn, default=with_xla)
    return differentiable(with_cudnn if everywhere else on_gpus, with_xla)(*arguments)


def _missing_for_cudnn(
    query: Array,
    value: Array,
    bias: Any,
    mask: Any,
    segments: tuple,
    query_offset: Any,
    is_causal: bool,
    sinks: Array | None,
    cap: float | None,
    return_residual: bool,
) -> list[str]:
    """The requirements of cuDNN that this call does not meet."""
    head_dim = query.shape[3]
    needs = {
        f"bfloat16 or float16 (got {query.dtype})": query.dtype != jnp.float32,
        f"head_dim a multiple of 8 up to 128 (got {head_dim})": head_dim % 8 == 0 and head_dim <= 128,
        f"value's head_dim that of query (got {value.shape[3]} and {head_dim})": value.shape[3] == head_dim,
        "no bias": bias is None,
        "no mask": mask is None,
        "no segment_ids": segments[0] is None,
        f"query_offset=0 where is_causal (got {query_offset})": not is_causal
        or (is_int(query_offset) and query_offset == 0),
        "no sinks": sinks is None,
        "no logits_soft_cap": cap is None,
        "no return_residual": not return_residual,
    }
    return [need for need, met in needs.items() if not met]


def _with_cudnn(
    query,
    key,
    value,
    bias,
    mask,
    query_lengths,
    key_lengths,
    segments,
    query_offset,
    sinks,
    *,
    scale,
    is_causal,
):
    del bias, mask, segments, query_offset, sinks  # _missing_for_cudnn refuses those that would matter
    query, key, value = _without_padding(query, key, value, query_lengths, key_lengths)
    out = jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        implementation="cudnn",
    )
    seen = None if key_lengths is None else (key_lengths > 0)[:, None, None, None]
    return _zero_unseen(out, seen, query_lengths)


def _with_xla(
    query,
    key,
    value,
    bias,
    mask,
    query_lengths,
    key_lengths,
    segments,
    query_offset,
    sinks,
    *,
    scale,
    is_causal,
    cap,
    return_residual,
):
    """Plain products: jax 0.10 cannot lower the bfloat16 gradient of `jax.nn.dot_product_attention` under strict dtype
    promotion."""
    query, key, value = _without_padding(query, key, value, query_lengths, key_lengths)
    (batch, num_queries, heads, head_dim), (num_keys, kv_heads) = query.shape, key.shape[1:3]
    grouped = query.reshape(batch, num_queries, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * scale
    scores = scores if cap is None else soft_cap(scores, cap)
    positions = jnp.arange(num_queries, dtype=jnp.int32) + query_offset
    visible = _visible(positions, num_keys, mask, key_lengths, segments, is_causal)
    seen = None
    if bias is not None:
        if not isinstance(bias, jax.Array):
            bias = bias(positions, jnp.arange(num_keys, dtype=jnp.int32))[None]
            expected = (1, heads, num_queries, num_keys)
            require(bias.shape == expected, f"bias must give shape {expected[1:]}, gave {bias.shape[1:]}")
        split = scores.shape[1:3] if bias.shape[1] > 1 else (1, 1)
        bias = bias.astype(jnp.float32)
        scores = scores + bias.reshape(bias.shape[0], *split, *bias.shape[2:])
        visible.append(~jnp.isneginf(bias))
    if visible:
        mask = functools.reduce(jnp.logical_and, visible)
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], num_queries, num_keys))
        split = scores.shape[1:3] if mask.shape[1] > 1 else (1, 1)
        scores = jnp.where(mask.reshape(mask.shape[0], *split, *mask.shape[2:]), scores, MASKED)
        seen = jnp.swapaxes(mask.any(-1), 1, 2)[..., None]
    weights = jax.nn.softmax(scores, axis=-1) if sinks is None else _softmax_with_sinks(scores, sinks)
    out = jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    out = out.reshape(batch, num_queries, heads, value.shape[3]).astype(query.dtype)
    out = _zero_unseen(out, seen, query_lengths)
    if not return_residual:
        return out
    log_sums = jax.nn.logsumexp(scores, axis=-1).reshape(batch, heads, num_queries).swapaxes(1, 2)
    log_sums = log_sums if sinks is None else jnp.logaddexp(log_sums, sinks[None, None])
    if query_lengths is not None:
        inside = (jnp.arange(num_queries, dtype=jnp.int32)[None] < query_lengths[:, None])[..., None, None]
        seen = inside if seen is None else seen & inside
    nothing = -jnp.inf if sinks is None else jnp.broadcast_to(sinks, log_sums.shape)
    log_sums = log_sums if seen is None else jnp.where(seen[..., 0], log_sums, nothing)
    return out, log_sums.astype(query.dtype)


def _softmax_with_sinks(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, " N"]
) -> Float[Array, "B K G T S"]:
    """The weights of the keys in a softmax over them and their head's sink."""
    sinks = sinks.reshape(1, *scores.shape[1:3], 1, 1)
    top = lax.stop_gradient(jnp.maximum(jnp.max(scores, -1, keepdims=True), sinks))
    exponentials = jnp.exp(scores - top)
    return exponentials / (jnp.sum(exponentials, -1, keepdims=True) + jnp.exp(sinks - top))


def _without_padding(query, key, value, query_lengths, key_lengths):
    return (
        zero_padding(query, query_lengths),
        zero_padding(key, key_lengths),
        zero_padding(value, key_lengths),
    )


def _visible(
    positions: Int[Array, " T"],
    num_keys: int,
    mask: Bool[Array, "#B #N #T #S"] | None,
    key_lengths: Int[Array, " B"] | None,
    segments: tuple,
    is_causal: bool,
) -> list[Bool[Array, "#B #N #T #S"]]:
    """The conditions for a query to see a key, all of which must hold."""
    keys = jnp.arange(num_keys, dtype=jnp.int32)
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append((positions[:, None] >= keys[None, :])[None, None])
    if key_lengths is not None:
        conditions.append((keys[None, :] < key_lengths[:, None])[:, None, None, :])
    if segments[0] is not None:
        conditions.append((segments[0][:, :, None] == segments[1][:, None, :])[:, None])
    return conditions


def _zero_unseen(out: Array, seen: Array | None, query_lengths: Array | None) -> Array:
    if seen is not None:
        out = jnp.where(seen, out, jnp.zeros((), out.dtype))
    return zero_padding(out, query_lengths)
