"""MLR attention token by token, from the reduced key cache (002, section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_dtypes, is_int
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.structured.mlr import BlockSizes, check_block_sizes, check_ranks, feature_scales

# Queries at a time: their scores on all keys are the largest array that exists.
_QUERY_BLOCK = 256


class MlrState(NamedTuple):
    """What generation keeps of the tokens so far.

    Attributes:
      keys: for each level (B, b_l, K, r_l): the level's slice of the keys of its current block, each at its place in
        the block; earlier blocks are of no use to later tokens. b_l is at most the longest sequence.
      value: (B, S, K, V), for sequences of up to S tokens.
      tokens: () int32, how many there were so far.
    """

    keys: tuple[Float[Array, "B b K r"], ...]
    value: Float[Array, "B S K V"]
    tokens: Int[Array, ""]


def init_mlr_state(
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    *,
    ranks: Sequence[int],
    block_sizes: BlockSizes,
    dtype: Any = jnp.float32,
) -> MlrState:
    """The state before the first of up to `length` tokens.

    Its keys are sum_l r_l min(b_l, length) numbers for each sequence and key head (002, section 3.4), where full
    attention has head_dim * length.

    Raises:
      ValueError: sizes, ranks or block sizes that don't fit, naming the argument.
    """
    for name, size in (("batch", batch), ("length", length), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        require(is_int(size) and size >= 1, f"{name} must be an int of at least 1, got {size!r}")
    ranks = check_ranks(ranks, head_dim)
    sizes = _sizes(check_block_sizes(block_sizes, len(ranks)), length)
    return MlrState(
        tuple(jnp.zeros((batch, size, kv_heads, rank), dtype) for size, rank in zip(sizes, ranks)),
        jnp.zeros((batch, length, kv_heads, head_dim), dtype),
        jnp.zeros((), jnp.int32),
    )


def mlr_attention_step(
    query: Float[Array, "B L N H"],
    key: Float[Array, "B L K H"],
    value: Float[Array, "B L K V"],
    state: MlrState,
    *,
    ranks: Sequence[int],
    block_sizes: BlockSizes,
    scale: float | Sequence[float] | None = None,
    divide_by_levels: bool = False,
    count: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B L N V"], MlrState]:
    """Causal `mlr_attention` of L new tokens behind those in the state: any number at a time, beginning anywhere.

    A single token costs 2 sum_l r_l b_l FLOPs for its scores; several at once are scored on all keys, some queries at a
    time.

    Args:
      query, key, value: of the new tokens, as in `mlr_attention`.
      state: from `init_mlr_state` or an earlier step.
      ranks, block_sizes, scale, divide_by_levels: as in `mlr_attention`, the same in each step.
      count: how many of the new tokens exist, the first ones (a traced int scalar; None: all). The rest leave no trace
        in the state, and what they give is undefined.

    Returns:
      (B, L, N, V) in query's dtype and the new state.

    Raises:
      ValueError: arguments that don't fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    length = query.shape[1]
    require(key.shape[1] == length, f"key must have query's length {length}, got {key.shape[1]}")
    ranks = check_ranks(ranks, query.shape[3])
    longest = state.value.shape[1]
    sizes = _sizes(check_block_sizes(block_sizes, len(ranks)), longest)
    expected = tuple((*key.shape[:1], size, key.shape[2], rank) for size, rank in zip(sizes, ranks))
    got = tuple(level.shape for level in state.keys)
    require(got == expected, f"state must be made for these ranks and block_sizes: {expected}, got {got}")
    query = query * feature_scales(ranks, scale, query.dtype)
    stops = [sum(ranks[: i + 1]) for i in range(len(ranks))]
    slices = [slice(stop - rank, stop) for stop, rank in zip(stops, ranks)]
    new = _write(state, key, value, sizes, slices, count)
    rows = _Rows(sizes, slices, divide_by_levels, new.value)
    if length == 1:
        return rows.single(query, new.keys, state.tokens), new
    keys = _on_all_places(state, key, sizes, slices, longest)
    return by_query_blocks(
        lambda query, _, offset: rows.several(query, keys, offset), _QUERY_BLOCK, query, offset=state.tokens
    ), new


def _sizes(block_sizes: BlockSizes, longest: int) -> list[int]:
    return [longest if size is None else min(size, longest) for size in block_sizes]


def _write(
    state: MlrState, key: Array, value: Array, sizes: Sequence[int], slices: Sequence[slice], count: Any
) -> MlrState:
    """The state with the new tokens in it."""
    length, start = key.shape[1], state.tokens
    places = start + jnp.arange(length, dtype=jnp.int32)
    end = start + (length if count is None else count)

    def put(old: Array, new: Array, slots: Array) -> Array:
        # Slots past the end are dropped: tokens that don't exist, and blocks that are over already.
        return old.at[:, jnp.where(places < end, slots, old.shape[1])].set(new, mode="drop")

    keys = []
    for old, size, own in zip(state.keys, sizes, slices):
        current = places // size == (end - 1) // size
        keys.append(put(old, key[..., own], jnp.where(current, places % size, size)))
    return MlrState(tuple(keys), put(state.value, value, places), jnp.asarray(end, jnp.int32))


def _on_all_places(
    state: MlrState, key: Array, sizes: Sequence[int], slices: Sequence[slice], longest: int
) -> Float[Array, "B S K H"]:
    """The keys of old and new tokens at their places, as far as the new tokens need them; anything elsewhere."""
    start = state.tokens
    places = start + jnp.arange(key.shape[1], dtype=jnp.int32)
    levels = []
    for old, size, own in zip(state.keys, sizes, slices):
        room = jnp.pad(old, [(0, 0), (0, longest), (0, 0), (0, 0)])
        # The block that the last of the old tokens is in comes first in `room`, and goes to its place by a turn.
        first = jnp.maximum(start - 1, 0) // size * size
        turned = jnp.roll(room, first, axis=1)[:, :longest]
        levels.append(turned.at[:, places].set(key[..., own], mode="drop"))
    return jnp.concatenate(levels, -1)


class _Rows:
    """Outputs of queries at known places from scores of each level."""

    def __init__(self, sizes: Sequence[int], slices: Sequence[slice], divide: bool, value: Array):
        self.sizes, self.slices, self.divide, self.value = sizes, slices, divide, value
        self.columns = jnp.arange(value.shape[1], dtype=jnp.int32)[None, :]

    def single(self, query: Array, keys: tuple[Array, ...], place: Array) -> Array:
        """One query, each level on the keys of its current block."""
        longest = self.value.shape[1]
        grouped = self._group(query)
        scores = jnp.zeros((*grouped.shape[:4], 2 * longest), jnp.float32)
        for level, size, own in zip(keys, self.sizes, self.slices):
            first = place // size * size
            here = self._dot(grouped[..., own], level)
            old = lax.dynamic_slice_in_dim(scores, first, size, axis=4)
            scores = lax.dynamic_update_slice_in_dim(scores, old + here, first, axis=4)
        return self._read(scores[..., :longest], place[None, None])

    def several(self, query: Array, keys: Array, offset: Any) -> Array:
        """Queries from `offset` on, on the keys of all levels at their places."""
        places = (jnp.arange(query.shape[1], dtype=jnp.int32) + offset)[:, None]
        grouped = self._group(query)
        scores: Any = 0.0
        for size, own in zip(self.sizes, self.slices):
            level = self._dot(grouped[..., own], keys[..., own])
            scores = scores + jnp.where(
                (places // size == self.columns // size)[None, None, None], level, 0.0
            )
        return self._read(scores, places)

    def _group(self, query: Array) -> Float[Array, "B K G L H"]:
        batch, length, heads, size = query.shape
        kv_heads = self.value.shape[2]
        return query.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)

    def _dot(self, query: Array, key: Array) -> Float[Array, "B K G L S"]:
        return jnp.einsum("bkgth,bskh->bkgts", query, key, preferred_element_type=jnp.float32)

    def _read(self, scores: Array, places: Array) -> Float[Array, "B L N V"]:
        if self.divide:
            same = [
                (places // size == self.columns // size).astype(jnp.float32)[None, None, None]
                for size in self.sizes
            ]
            scores = scores / jnp.maximum(sum(same[1:], start=same[0]), 1.0)
        seen = (self.columns <= places)[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(self.value.dtype)
        out = jnp.einsum("bkgts,bskv->btkgv", weights, self.value, preferred_element_type=jnp.float32)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(self.value.dtype)
