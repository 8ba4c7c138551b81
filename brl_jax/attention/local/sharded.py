"""Attention over sequences whose tokens are cut over a mesh axis; to be called inside `jax.shard_map`.

Each device holds one of n equal stretches of every sequence, in the order of the axis, and gives the results of its own
queries. What it needs of others comes in one of two ways, both differentiable:

  a halo      the tokens next to its own, by `ppermute`: `local_attention` fetches what its pattern can reach (from
              several neighbours, where that is more than a stretch), `compress_blocks` the history of its blocks;
  a merge     `brl_jax.compress(..., axis_name=...)` merges the softmaxes of all stretches by their log-sum-exp.

`propagate` needs nothing: its keys are the compressed tokens, which every device has. No device ever holds the keys of
a whole sequence, unless a pattern reaches over it.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.compressed import compress_blocks as one_device
from brl_jax.attention.core.arguments import check_lengths, check_segments
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.local.api import local_attention as local_attention_of_one
from brl_jax.attention.local.patterns import Dilated, Pattern, SlidingWindow
from pallas_kernels.absent import mark_absent


def tokens_before(x: Float[Array, "B T ..."], count: int, axis_name: str) -> Float[Array, "B count ..."]:
    """The `count` tokens that precede this device's, in order; zeros before the first of the sequence."""
    return _neighbours(x, count, axis_name, after=False)


def tokens_after(x: Float[Array, "B T ..."], count: int, axis_name: str) -> Float[Array, "B count ..."]:
    """The `count` tokens that follow this device's, in order; zeros after the last of the sequence."""
    return _neighbours(x, count, axis_name, after=True)


def _neighbours(x: Array, count: int, axis_name: str, after: bool) -> Array:
    size, shards = x.shape[1], lax.axis_size(axis_name)
    pieces = []
    # The hop-th neighbour gives what lies nearest to this device: whole stretches, and a part of the farthest one.
    for hop in range(1, min(-(-count // size), shards - 1) + 1):
        part = min(size, count - (hop - 1) * size)
        piece = (
            lax.slice_in_dim(x, 0, part, axis=1) if after else lax.slice_in_dim(x, size - part, size, axis=1)
        )
        pairs = [(i, i - hop) if after else (i - hop, i) for i in range(hop, shards)]
        pieces.append(lax.ppermute(piece, axis_name, pairs))
    missing = count - sum(piece.shape[1] for piece in pieces)
    if missing or not pieces:
        pieces.append(jnp.zeros((x.shape[0], missing, *x.shape[2:]), x.dtype))
    return jnp.concatenate(pieces if after else pieces[::-1], axis=1)


def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    *,
    axis_name: str,
    pattern: Pattern,
    is_causal: bool = False,
    scale: float | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """`brl_jax.local_attention` of sequences that are cut over `axis_name`, T tokens a device.

    Keys and values (and segment ids) travel as far as the pattern reaches: (lookback + lookahead) tokens a device, over
    as many neighbours as hold them.

    Args:
      query, key, value: this device's tokens.
      axis_name: the mesh axis, in whose order the sequence goes on.
      pattern: one whose lookback and (unless causal) lookahead are bounded.
      key_value_seq_lengths: (B,), of the whole sequences.
      is_causal, scale, segment_ids, implementation: as in `brl_jax.local_attention`; segment ids are this device's.

    Returns:
      (B, T, N, H) in query's dtype, of this device's queries.

    Raises:
      ValueError: a pattern without bounds, and whatever `brl_jax.local_attention` refuses.
    """
    check_qkv(query, key, value)
    require(
        query.shape[1] == key.shape[1], f"key must have query's {query.shape[1]} tokens, got {key.shape[1]}"
    )
    before, after = pattern.lookback, 0 if is_causal else pattern.lookahead
    require(
        before is not None and after is not None,
        f"pattern must see a bounded stretch where the sequence is cut over a mesh axis, got {pattern!r}",
    )
    assert before is not None
    assert after is not None
    batch, size = key.shape[:2]
    shards, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    before, after = (min(reach, (shards - 1) * size) for reach in (before, after))
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query_ids, key_ids = check_segments(segment_ids, query.shape, key.shape)

    first = index * size
    stop = jnp.full((1,), shards * size, jnp.int32) if lengths is None else lengths
    if lengths is not None:
        inside = (first + jnp.arange(size, dtype=jnp.int32))[None] < stop[:, None]
        key, value = (jnp.where(inside[:, :, None, None], x, jnp.zeros((), x.dtype)) for x in (key, value))
    key, value = (_surrounded(x, before, after, axis_name) for x in (key, value))
    key_ids = None if key_ids is None else _surrounded(key_ids, before, after, axis_name)
    places = first - before + jnp.arange(before + size + after, dtype=jnp.int32)
    key_exists = (places >= 0)[None] & (places[None] < stop[:, None])

    query_offset, query_exists = before, jnp.ones((1, size), bool)
    # Kernels for windows want as many queries as keys. Where the halo is short, absent queries before and after cost
    # less than the kernels for any pattern do.
    padded = before + after <= size
    if padded:
        query_offset = 0
        query = jnp.pad(query, ((0, 0), (before, after), (0, 0), (0, 0)))
        query_exists = jnp.pad(query_exists, ((0, 0), (before, after)))
        query_ids = None if query_ids is None else jnp.pad(query_ids, ((0, 0), (before, after)))
    query_ids, key_ids = mark_absent(query_ids, key_ids, query_exists, key_exists, batch)
    # Only boundaries at absolute places ask where the keys stand.
    moves = isinstance(pattern, (SlidingWindow, Dilated))
    out = local_attention_of_one(
        query,
        key,
        value,
        pattern=pattern,
        is_causal=is_causal,
        scale=scale,
        segment_ids=(query_ids, key_ids),
        query_offset=query_offset,
        key_offset=0 if moves else first - before,
        implementation=implementation,
    )
    return lax.slice_in_dim(out, before, before + size, axis=1) if padded else out


def _surrounded(x: Array, before: int, after: int, axis_name: str) -> Array:
    """x between the tokens before and after it."""
    parts = [tokens_before(x, before, axis_name)] if before else []
    parts += [x, *([tokens_after(x, after, axis_name)] if after else [])]
    return jnp.concatenate(parts, axis=1)


def compress_blocks(
    query: Float[Array, "B C M N H"],
    key: Float[Array, "B T N H"],
    contrast_key: Float[Array, "B T N H"] | None,
    value: Float[Array, "B T N H"],
    *,
    axis_name: str,
    block_size: int,
    history_size: int,
    history_lengths: Int[Array, "C"] | Int[Array, "B C"],
    earlier_key: Float[Array, "B R N H"] | None = None,
    earlier_contrast_key: Float[Array, "B R N H"] | None = None,
    earlier_value: Float[Array, "B R N H"] | None = None,
    **options: Any,
) -> Float[Array, "B C M N H"]:
    """`compress_blocks` of sequences that are cut over `axis_name`: each of this device's C blocks reads its history.

    Unlike there, key, contrast_key and value are the blocks' own tokens, T = C * block_size; the `history_size` tokens
    before them come from the neighbours.

    Args:
      query: of this device's blocks.
      axis_name: the mesh axis, in whose order the sequence goes on.
      history_lengths: of this device's blocks, how many of their keys, the last ones, exist.
      earlier_key, earlier_contrast_key, earlier_value: of the history_size tokens before the whole sequence, the same
        on all devices.
      block_size, history_size, options: as in `brl_jax.compress_blocks`.

    Returns:
      (B, C, M, N, H) in the dtype of query.

    Raises:
      ValueError: where T is not C * block_size.
    """
    require(query.ndim == 5, f"query must have shape (B, blocks, M, N, H), got {query.shape}")
    require(
        key.shape[1] == query.shape[1] * block_size,
        f"key must hold the {query.shape[1]} blocks of {block_size} tokens of this device, got {key.shape[1]} tokens",
    )

    def with_history(x: Any, first: Any) -> Any:
        if x is None:
            return None
        history = tokens_before(x, history_size, axis_name)
        if first is not None:
            # Where the sequence began less than history_size tokens ago, what precedes it is in reach as well.
            room = jnp.pad(first, ((0, 0), (0, history_size), (0, 0), (0, 0)))
            place = jnp.minimum(lax.axis_index(axis_name) * x.shape[1], history_size)
            history += lax.dynamic_slice_in_dim(room, place, history_size, axis=1)
        return jnp.concatenate([history, x], axis=1)

    return one_device.compress_blocks(
        query,
        with_history(key, earlier_key),
        with_history(contrast_key, earlier_contrast_key),
        with_history(value, earlier_value),
        block_size=block_size,
        history_size=history_size,
        history_lengths=history_lengths,
        **options,
    )
