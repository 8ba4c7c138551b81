"""Generation with MLR attention, which caches one block of keys per level (arXiv:2509.07963, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.core.state import write_places
from brl_jax.attention.structured.mlr_levels import check_block_sizes, check_ranks, doubling_block_sizes
from brl_jax.fields import Count, declared


class MLRState(NamedTuple):
    """What causal `mlr_attention` keeps of the tokens so far.

    Attributes:
      keys: for each level l its slice (B, K, b_l, r_l) of the keys of its current block, each key at its position in
        the block. Later tokens never need earlier blocks. b_l is at most S.
      value: (B, K, S, V), the values of up to S tokens. Heads come before tokens, so that no product with a new token's
        query copies them.
      length: () int32, the number of tokens so far.
    """

    keys: tuple[Float[Array, "B K _ _"], ...]
    value: Float[Array, "B K S V"]
    length: Int[Array, ""]


@declared
def init_mlr_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    length: Count,
    ranks: Sequence[Count],
    block_sizes: Sequence[Count | None] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> MLRState:
    """Returns the state of `mlr_attention` before the first of up to `length` tokens.

    Its keys take sum_l r_l min(b_l, length) numbers for each sequence and key head, compared with head_dim * length for
    full attention.

    Args:
      value_dim: head_dim of the values; head_dim by default.
      ranks, block_sizes: as for `mlr_attention`.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    value_dim = head_dim if value_dim is None else value_dim
    ranks = check_ranks(ranks, head_dim)
    if block_sizes is None:
        block_sizes = doubling_block_sizes(length, len(ranks))
    block_sizes = check_block_sizes(block_sizes, len(ranks))
    sizes = [length if size is None else min(size, length) for size in block_sizes]
    return MLRState(
        tuple(jnp.zeros((batch, num_kv_heads, size, rank), dtype) for size, rank in zip(sizes, ranks)),
        jnp.zeros((batch, num_kv_heads, length, value_dim), dtype),
        jnp.zeros((), jnp.int32),
    )


def extend(
    query: Float[Array, "B L N H"],
    key: Float[Array, "B L K H"],
    value: Float[Array, "B L K V"],
    state: MLRState,
    count: Any,
) -> tuple[Float[Array, "B L N V"], MLRState]:
    """Causal attention of L new tokens, which also see the state's, and the state after them. Queries are scaled.

    The scores of a single token cost 2 sum_l r_l b_l FLOPs. Several tokens are scored against all keys, a block of
    queries at a time.
    """
    length = query.shape[1]
    sizes, ranks = ([level.shape[axis] for level in state.keys] for axis in (2, 3))
    stops = [sum(ranks[: i + 1]) for i in range(len(ranks))]
    slices = [slice(stop - rank, stop) for stop, rank in zip(stops, ranks)]
    new = _write(state, key, value, sizes, slices, count)
    rows = _Rows(sizes, slices, new.value)
    if length == 1:
        return rows.single(query, new.keys, state.length), new
    keys = _keys_at_positions(state, key, sizes, slices)
    out = by_query_blocks(
        lambda query, _, offset: rows.several(query, keys, offset), QUERY_BLOCK, query, offset=state.length
    )
    return out, new


def _write(
    state: MLRState, key: Array, value: Array, sizes: Sequence[int], slices: Sequence[slice], count: Any
) -> MLRState:
    """Returns the state with the new tokens."""
    length, start = key.shape[1], state.length
    positions = start + jnp.arange(length, dtype=jnp.int32)
    end = start + (length if count is None else count)

    def put(old: Array, new: Array, slots: Array) -> Array:
        # Invalid tokens and tokens of completed blocks go to slots past the end, which are not written.
        places = jnp.where(positions < end, slots, old.shape[2])
        return write_places(old, jnp.swapaxes(new, 1, 2), places, axis=2)

    keys = []
    for old, size, own in zip(state.keys, sizes, slices):
        current = positions // size == (end - 1) // size
        keys.append(put(old, key[..., own], jnp.where(current, positions % size, size)))
    return MLRState(tuple(keys), put(state.value, value, positions), jnp.asarray(end, jnp.int32))


def _keys_at_positions(
    state: MLRState, key: Array, sizes: Sequence[int], slices: Sequence[slice]
) -> Float[Array, "B K S H"]:
    """Old and new keys at their positions, where the new tokens need them; undefined elsewhere."""
    start, longest = state.length, state.value.shape[2]
    positions = start + jnp.arange(key.shape[1], dtype=jnp.int32)
    levels = []
    for old, size, own in zip(state.keys, sizes, slices):
        padded = jnp.pad(old, [(0, 0), (0, 0), (0, longest), (0, 0)])
        # Move the last old token's block from the beginning to its position.
        first = jnp.maximum(start - 1, 0) // size * size
        rolled = jnp.roll(padded, first, axis=2)[:, :, :longest]
        new = jnp.swapaxes(key[..., own], 1, 2)
        levels.append(rolled.at[:, :, positions].set(new, mode="drop"))
    return jnp.concatenate(levels, -1)


class _Rows:
    def __init__(self, sizes: Sequence[int], slices: Sequence[slice], value: Array):
        self.sizes, self.slices, self.value = sizes, slices, value
        self.columns = jnp.arange(value.shape[2], dtype=jnp.int32)[None, :]

    def single(self, query: Array, keys: tuple[Array, ...], position: Array) -> Array:
        """The output of one query; each level scores it against its current block's keys."""
        longest = self.value.shape[2]
        grouped = self._group(query)
        scores = jnp.zeros((*grouped.shape[:4], 2 * longest), jnp.float32)
        for level, size, own in zip(keys, self.sizes, self.slices):
            first = position // size * size
            here = self._dot(grouped[..., own], level)
            old = lax.dynamic_slice_in_dim(scores, first, size, axis=4)
            scores = lax.dynamic_update_slice_in_dim(scores, old + here, first, axis=4)
        return self._read(scores[..., :longest], position[None, None])

    def several(self, query: Array, keys: Array, offset: Any) -> Array:
        """The outputs of queries from position `offset` on, scored against all keys."""
        positions = (jnp.arange(query.shape[1], dtype=jnp.int32) + offset)[:, None]
        grouped = self._group(query)
        scores: Any = 0.0
        for size, own in zip(self.sizes, self.slices):
            level = self._dot(grouped[..., own], keys[..., own])
            scores = scores + jnp.where(
                (positions // size == self.columns // size)[None, None, None], level, 0.0
            )
        return self._read(scores, positions)

    def _group(self, query: Array) -> Float[Array, "B K G L H"]:
        batch, length, heads, size = query.shape
        kv_heads = self.value.shape[1]
        return query.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)

    def _dot(self, query: Array, key: Array) -> Float[Array, "B K G L S"]:
        # With two axes of rows the compiler would transpose the keys.
        rows = query.reshape(*query.shape[:2], -1, query.shape[-1])
        scores = jnp.einsum("bkrh,bksh->bkrs", rows, key, preferred_element_type=jnp.float32)
        return scores.reshape(*query.shape[:4], -1)

    def _read(self, scores: Array, positions: Array) -> Float[Array, "B L N V"]:
        seen = (self.columns <= positions)[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(self.value.dtype)
        rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
        out = jnp.einsum("bkrs,bksv->bkrv", rows, self.value, preferred_element_type=jnp.float32)
        out = jnp.moveaxis(out.reshape(*weights.shape[:4], -1), 3, 1)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(self.value.dtype)
