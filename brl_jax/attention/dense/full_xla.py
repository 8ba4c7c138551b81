"""Full softmax attention through XLA: all queries at once, or one block of queries at a time."""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.checks import require, zero_padding
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.core.scores import seen_with_bias, soft_cap
from brl_jax.attention.core.softmax import MASKED, rounded
from pallas_kernels.absent import existing

# Groups of causal queries. Each group has its own loop.
_GROUPS = 4


class FullArrays(NamedTuple):
    """The checked arrays of one call; None for an absent one.

    Attributes:
      bias: a `PositionBias`, or an array (B or 1, N or 1, T or 1, S or 1).
      segments: the segment ids of the queries and of the keys.
      query_offset: () int32.
      sinks: in float32.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]
    bias: Any = None
    mask: Bool[Array, "#B #N #T #S"] | None = None
    query_lengths: Int[Array, " B"] | None = None
    key_lengths: Int[Array, " B"] | None = None
    segments: tuple[Int[Array, "B T"] | None, Int[Array, "B S"] | None] = (None, None)
    query_offset: Any = np.int32(0)
    sinks: Float[Array, " N"] | None = None

    def without_padding(self) -> FullArrays:
        return self._replace(
            query=zero_padding(self.query, self.query_lengths),
            key=zero_padding(self.key, self.key_lengths),
            value=zero_padding(self.value, self.key_lengths),
        )


def attend_at_once(
    x: FullArrays,
    *,
    scale: float,
    is_causal: bool,
    cap: float | None,
    return_residual: bool,
    sums_by_product: bool = False,
) -> Any:
    """`full_attention` for checked arguments, with a float32 residual.

    It does not call `jax.nn.dot_product_attention`, whose bfloat16 gradient JAX 0.10 cannot lower under strict dtype
    promotion.

    Args:
      sums_by_product: whether to sum the weights by a column of ones in the values. On a CPU a separate sum would take
        the time of the whole product.
    """
    query, key, value, bias, mask, query_lengths, key_lengths, segments, offset, sinks = x.without_padding()
    (batch, num_queries, heads, head_dim), (num_keys, kv_heads) = query.shape, key.shape[1:3]
    single = num_queries == 1
    if single:
        # Decoding caches keep heads before tokens; in this order neither product copies the keys or values.
        key, value = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        rows = query.reshape(batch, kv_heads, heads // kv_heads, head_dim)
        products = jnp.einsum("bkgh,bksh->bkgs", rows, key, preferred_element_type=jnp.float32)[:, :, :, None]
    else:
        grouped = query.reshape(batch, num_queries, kv_heads, heads // kv_heads, head_dim)
        products = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    scores = products * scale
    scores = rounded(scores) if cap is None else soft_cap(scores, cap)
    positions = jnp.arange(num_queries, dtype=jnp.int32) + offset
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
        visible.append(seen_with_bias(bias))
    if visible:
        mask = functools.reduce(jnp.logical_and, visible)
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], num_queries, num_keys))
        split = scores.shape[1:3] if mask.shape[1] > 1 else (1, 1)
        scores = jnp.where(mask.reshape(mask.shape[0], *split, *mask.shape[2:]), scores, MASKED)
        seen = jnp.swapaxes(mask.any(-1), 1, 2)[..., None]
    if single:
        weights = _softmax(scores, sinks).astype(value.dtype)
        out = jnp.einsum("bkgs,bksh->bkgh", weights[:, :, :, 0], value, preferred_element_type=jnp.float32)
    elif sums_by_product:
        top, at_sink = _top(scores, sinks)
        weights = jnp.exp(scores - top).astype(value.dtype)
        ones = jnp.ones((*value.shape[:3], 1), value.dtype)
        products = jnp.einsum(
            "bkgts,bskh->btkgh",
            weights,
            jnp.concatenate([value, ones], axis=-1),
            preferred_element_type=jnp.float32,
        )
        out = products[..., :-1] / (products[..., -1:] + jnp.moveaxis(at_sink, 3, 1))
    else:
        weights = _softmax(scores, sinks).astype(value.dtype)
        # In the order of the result, XLA would multiply the values by the weights, for which it has no bfloat16 product
        # on a CPU where the values come from a cache.
        out = jnp.einsum("bkgts,bskh->bkgth", weights, value, preferred_element_type=jnp.float32)
        out = jnp.moveaxis(out, 3, 1)
    out = out.reshape(batch, num_queries, heads, value.shape[3]).astype(query.dtype)
    out = zero_unseen(out, seen, query_lengths)
    if not return_residual:
        return out
    log_sums = jax.nn.logsumexp(scores, axis=-1).reshape(batch, heads, num_queries).swapaxes(1, 2)
    log_sums = log_sums if sinks is None else jnp.logaddexp(log_sums, sinks[None, None])
    if query_lengths is not None:
        inside = existing(query_lengths, num_queries)[..., None, None]
        seen = inside if seen is None else seen & inside
    nothing = -jnp.inf if sinks is None else jnp.broadcast_to(sinks, log_sums.shape)
    log_sums = log_sums if seen is None else jnp.where(seen[..., 0], log_sums, nothing)
    return out, log_sums


def _softmax(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, " N"] | None
) -> Float[Array, "B K G T S"]:
    """The weights of the keys in a softmax over the keys and, if given, the head's sink."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    top, at_sink = _top(scores, sinks)
    exponentials = jnp.exp(scores - top)
    return exponentials / (jnp.sum(exponentials, -1, keepdims=True) + at_sink)


def _top(
    scores: Float[Array, "B K G T S"], sinks: Float[Array, " N"] | None
) -> tuple[Float[Array, "B K G T 1"], Float[Array, "B K G T 1"]]:
    """Each row's largest score, as a constant for derivatives, and the sink's exponential relative to it, or 0."""
    top = jnp.max(scores, -1, keepdims=True)
    if sinks is None:
        return lax.stop_gradient(top), jnp.zeros_like(top)
    sinks = sinks.reshape(1, *scores.shape[1:3], 1, 1)
    top = lax.stop_gradient(jnp.maximum(top, sinks))
    return top, jnp.exp(sinks - top)


def _visible(
    positions: Int[Array, " T"],
    num_keys: int,
    mask: Bool[Array, "#B #N #T #S"] | None,
    key_lengths: Int[Array, " B"] | None,
    segments: tuple,
    is_causal: bool,
) -> list[Bool[Array, "#B #N #T #S"]]:
    """The conditions that must all hold for a query to see a key."""
    keys = jnp.arange(num_keys, dtype=jnp.int32)
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append((positions[:, None] >= keys[None, :])[None, None])
    if key_lengths is not None:
        conditions.append((keys[None, :] < key_lengths[:, None])[:, None, None, :])
    if segments[0] is not None:
        conditions.append((segments[0][:, :, None] == segments[1][:, None, :])[:, None])
    return conditions


def zero_unseen(out: Array, seen: Array | None, query_lengths: Array | None) -> Array:
    if seen is not None:
        out = jnp.where(seen, out, jnp.zeros((), out.dtype))
    return zero_padding(out, query_lengths)


def attend_in_blocks(x: FullArrays, *, known_offset: int | None = None, **options: Any) -> Any:
    """`attend_at_once` on 256 queries at a time, in the backward pass too, so that memory is O(T + S).

    If bias or mask is an array with a row for each query, all queries run at once: such an array is as large as the
    scores. Causal queries at a `known_offset` (the value of `query_offset`) run in up to four groups. Each group reads
    only the keys up to its last query, which skips 3/8 of the pairs of a square.
    """
    if any(isinstance(each, jax.Array) and each.shape[2] > 1 for each in (x.bias, x.mask)):
        return attend_at_once(x, **options)
    (query_ids, key_ids), query_offset = x.segments, x.query_offset

    def attend_to(end: int, query: Array, query_segments: Array | None, offset: Any) -> Any:
        some = x._replace(
            query=query,
            key=x.key[:, :end],
            value=x.value[:, :end],
            bias=_first_keys(x.bias, end),
            mask=_first_keys(x.mask, end),
            query_lengths=None if x.query_lengths is None else x.query_lengths - (offset - query_offset),
            segments=(query_segments, None if key_ids is None else key_ids[:, :end]),
            query_offset=offset,
        )
        return attend_at_once(some, **options)

    num_queries, num_keys = x.query.shape[1], x.key.shape[1]
    if not options["is_causal"] or known_offset is None:
        return by_query_blocks(
            functools.partial(attend_to, num_keys), QUERY_BLOCK, x.query, query_ids, query_offset
        )
    # A group needs at least two blocks, because only a loop over blocks drops the scores for the backward pass.
    blocks = -(-num_queries // QUERY_BLOCK)
    groups = max(min(_GROUPS, blocks // 2), 1)
    bounds = [*(blocks * i // groups * QUERY_BLOCK for i in range(groups)), num_queries]
    outputs = []
    for start, stop in itertools.pairwise(bounds):
        end = min(max(known_offset + stop, 1), num_keys)
        ids = None if query_ids is None else query_ids[:, start:stop]
        outputs.append(
            by_query_blocks(
                functools.partial(attend_to, end),
                QUERY_BLOCK,
                x.query[:, start:stop],
                ids,
                query_offset + start,
            )
        )
    return jax.tree.map(lambda *pieces: jnp.concatenate(pieces, axis=1), *outputs)


def _first_keys(array: Any, end: int) -> Any:
    """Cuts a bias or mask to the first keys, unless it is the same for all keys or a function of positions."""
    return array[..., :end] if isinstance(array, jax.Array) and array.shape[-1] > 1 else array
