"""MLR attention for generation, with the reduced key cache of arXiv:2509.07963, section 3.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from brl_jax.attention.core.arguments import check_dtypes, check_sizes
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.in_place import write_places
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.structured.mlr import BlockSizes, check_block_sizes, check_ranks, feature_scales


class MLRState(NamedTuple):
    """What `mlr_attention_step` keeps of the tokens so far.

    The shapes of the keys contain the ranks r_l and the block sizes b_l of the levels.

    Attributes:
      keys: for each level l the slice (B, K, b_l, r_l) of the keys of its current block, each key at its position in
        the block. Later tokens never need earlier blocks. b_l is at most S.
      value: (B, K, S, V), the values of sequences of up to S tokens. Heads come before tokens, so that no product with
        a new token's query copies them.
      tokens: () int32, the number of tokens so far.
    """

    keys: tuple[Float[Array, "B K _ _"], ...]
    value: Float[Array, "B K S V"]
    tokens: Int[Array, ""]


def init_mlr_state(
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    *,
    ranks: Sequence[int],
    block_sizes: BlockSizes,
    value_dim: int | None = None,
    dtype: DTypeLike = jnp.float32,
) -> MLRState:
    """The state of `mlr_attention_step` before the first of up to `length` tokens.

    Its keys take sum_l r_l min(b_l, length) numbers for each sequence and key head (arXiv:2509.07963, section 3.4),
    where full attention needs head_dim * length.

    Args:
      length: S, the largest number of tokens that the state can take.
      kv_heads, head_dim: K and H.
      ranks, block_sizes: as for `mlr_attention`, but block_sizes cannot be None for all levels.
      value_dim: V, the head dimension of the values; head_dim where it is None.
      dtype: the dtype of the keys and values.

    Raises:
      ValueError: sizes, ranks or block sizes that do not fit, naming the argument.
    """
    value_dim = head_dim if value_dim is None else value_dim
    check_sizes(batch=batch, length=length, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    ranks = check_ranks(ranks, head_dim)
    sizes = _limited_sizes(check_block_sizes(block_sizes, len(ranks)), length)
    return MLRState(
        tuple(jnp.zeros((batch, kv_heads, size, rank), dtype) for size, rank in zip(sizes, ranks)),
        jnp.zeros((batch, kv_heads, length, value_dim), dtype),
        jnp.zeros((), jnp.int32),
    )


@attention_function
def mlr_attention_step(
    query: Float[Array, "B L N H"],
    key: Float[Array, "B L K H"],
    value: Float[Array, "B L K V"],
    state: MLRState,
    *,
    ranks: Sequence[int] | None = None,
    block_sizes: BlockSizes | None = None,
    scale: float | Sequence[float] | None = None,
    divide_by_levels: bool = False,
    count: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B L N V"], MLRState]:
    """Causal `mlr_attention` of L new tokens after those in the state: any number of them, beginning anywhere.

    (B, L, N, H), (B, L, K, H), (B, L, K, V) -> (B, L, N, V) and the new state::

        levels = {"ranks": (32, 16, 16), "block_sizes": (None, 128, 32)}
        state = init_mlr_state(batch, length, num_kv_heads, head_dim, **levels)
        out, state = mlr_attention_step(query, key, value, state)

    The scores of a single token cost 2 sum_l r_l b_l FLOPs. Several tokens at once are scored against all keys, a block
    of queries at a time.

    Args:
      query, key, value: those of the new tokens, as for `mlr_attention`.
      state: from `init_mlr_state` or an earlier step. The ranks and block sizes are those that it was made with.
      ranks, block_sizes: if given, they are compared with those of the state.
      scale, divide_by_levels: as for `mlr_attention`, and the same in every step.
      count: the number of new tokens that exist, counted from the first; None for all. The others leave no trace in the
        state, and their outputs are undefined.

    Returns:
      (B, L, N, V) in the dtype of the query and the new state. Tokens beyond the length of the state are lost.

    Raises:
      ValueError: arguments that do not fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    length = query.shape[1]
    require(key.shape[1] == length, f"key must have query's length {length}, got {key.shape[1]}")
    state_ranks, sizes = _check_state(state, key, value, ranks, block_sizes)
    query = query * feature_scales(state_ranks, scale, query.dtype)
    stops = [sum(state_ranks[: i + 1]) for i in range(len(state_ranks))]
    slices = [slice(stop - rank, stop) for stop, rank in zip(stops, state_ranks)]
    new = _write(state, key, value, sizes, slices, count)
    rows = _Rows(sizes, slices, divide_by_levels, new.value)
    if length == 1:
        return rows.single(query, new.keys, state.tokens), new
    keys = _keys_at_positions(state, key, sizes, slices)
    out = by_query_blocks(
        lambda query, _, offset: rows.several(query, keys, offset), QUERY_BLOCK, query, offset=state.tokens
    )
    return out, new


def _check_state(
    state: Any, key: Array, value: Array, ranks: Sequence[int] | None, block_sizes: BlockSizes | None
) -> tuple[tuple[int, ...], list[int]]:
    """The ranks and the block sizes of the state; raises ValueError unless it fits the arrays and what is given."""
    require(
        isinstance(state, MLRState),
        f"state must be an MLRState from init_mlr_state, got {type(state).__name__}",
    )
    longest = state.value.shape[2]
    own_ranks = tuple(level.shape[3] for level in state.keys)
    own_sizes = [level.shape[2] for level in state.keys]
    given_ranks = own_ranks if ranks is None else check_ranks(ranks, key.shape[3])
    given_sizes = own_sizes
    if block_sizes is not None:
        given_sizes = _limited_sizes(check_block_sizes(block_sizes, len(given_ranks)), longest)
    require(
        given_ranks == own_ranks and given_sizes == own_sizes,
        f"state must be made for these ranks and block_sizes: {given_ranks} and {given_sizes}, "
        f"got one for {own_ranks} and {own_sizes}",
    )
    batch, _, kv_heads, head_dim = key.shape
    expected = {
        **{
            f"keys[{level}]": ((batch, kv_heads, size, rank), key.dtype)
            for level, (size, rank) in enumerate(zip(own_sizes, own_ranks))
        },
        "value": ((batch, kv_heads, longest, value.shape[3]), value.dtype),
    }
    require(
        sum(own_ranks) == head_dim,
        f"state must be made for the head_dim {head_dim}, got one whose ranks sum to {sum(own_ranks)}",
    )
    for (name, (shape, dtype)), leaf in zip(expected.items(), (*state.keys, state.value)):
        require(
            leaf.shape == shape and leaf.dtype == dtype,
            f"state.{name} must be {dtype} of shape {shape}, got {leaf.dtype} of shape {leaf.shape}",
        )
    return own_ranks, own_sizes


def _limited_sizes(block_sizes: BlockSizes, longest: int) -> list[int]:
    """The block sizes, none of them larger than the longest sequence."""
    return [longest if size is None else min(size, longest) for size in block_sizes]


def _write(
    state: MLRState, key: Array, value: Array, sizes: Sequence[int], slices: Sequence[slice], count: Any
) -> MLRState:
    """The state with the new tokens in it."""
    length, start = key.shape[1], state.tokens
    positions = start + jnp.arange(length, dtype=jnp.int32)
    end = start + (length if count is None else count)

    def put(old: Array, new: Array, slots: Array) -> Array:
        # Writes to slots past the end are dropped: those of tokens that do not exist and of completed blocks.
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
    """The keys of old and new tokens at their positions where the new tokens need them, and undefined elsewhere."""
    start, longest = state.tokens, state.value.shape[2]
    positions = start + jnp.arange(key.shape[1], dtype=jnp.int32)
    levels = []
    for old, size, own in zip(state.keys, sizes, slices):
        room = jnp.pad(old, [(0, 0), (0, 0), (0, longest), (0, 0)])
        # The block of the last old token is first in `room`; rolling moves it to its position.
        first = jnp.maximum(start - 1, 0) // size * size
        rolled = jnp.roll(room, first, axis=2)[:, :, :longest]
        new = jnp.swapaxes(key[..., own], 1, 2)
        levels.append(rolled.at[:, :, positions].set(new, mode="drop"))
    return jnp.concatenate(levels, -1)


class _Rows:
    """Outputs of queries at known positions, from the scores of each level."""

    def __init__(self, sizes: Sequence[int], slices: Sequence[slice], divide: bool, value: Array):
        self.sizes, self.slices, self.divide, self.value = sizes, slices, divide, value
        self.columns = jnp.arange(value.shape[2], dtype=jnp.int32)[None, :]

    def single(self, query: Array, keys: tuple[Array, ...], position: Array) -> Array:
        """One query, which each level scores against the keys of its current block."""
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
        """Queries from position `offset` on, scored against the keys at all positions."""
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
        # One axis of rows: with two of them the compiler would transpose the keys.
        rows = query.reshape(*query.shape[:2], -1, query.shape[-1])
        scores = jnp.einsum("bkrh,bksh->bkrs", rows, key, preferred_element_type=jnp.float32)
        return scores.reshape(*query.shape[:4], -1)

    def _read(self, scores: Array, positions: Array) -> Float[Array, "B L N V"]:
        if self.divide:
            same = [
                (positions // size == self.columns // size).astype(jnp.float32)[None, None, None]
                for size in self.sizes
            ]
            scores = scores / jnp.maximum(sum(same[1:], start=same[0]), 1.0)
        seen = (self.columns <= positions)[None, None, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(self.value.dtype)
        rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
        out = jnp.einsum("bkrs,bksv->bkrv", rows, self.value, preferred_element_type=jnp.float32)
        out = jnp.moveaxis(out.reshape(*weights.shape[:4], -1), 3, 1)
        return out.reshape(*out.shape[:2], -1, out.shape[-1]).astype(self.value.dtype)
