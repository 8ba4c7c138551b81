"""Blocks of sequences packed into one row: each sequence has the same blocks as it would have alone.

The first block of a sequence has no history, so its compressed tokens do not depend on any token, and all sequences
share one set of them. A sequence of n tokens has (n - 1) // block further blocks, and all sequences of a row of T
tokens together have at most (T - 1) // block. A packed row therefore needs no more sets than a row with a single
sequence: set 0 for every first block, the others for the further blocks in their order.

Each further block directly follows a whole block of its sequence. Concatenated, these whole blocks have the layout of
`compress_blocks`: block j reads what ends at token j * block, as far back as its sequence reaches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.by_platform import Form, by_platform
from brl_jax.attention.core.segments import places_in_sequences


class PackedBlocks(NamedTuple):
    """The blocks of packed rows of T tokens. C = ceil(T / block) is the number of sets of compressed tokens.

    Attributes:
      is_first: (B, T), whether a token is in the first block of its sequence.
      place: (B, T), the token's position in its block.
      starts: (B, C - 1), where the further blocks start; T for those that do not exist.
      before: (B, C), how many tokens of its sequence precede each set's block; 0 for set 0 and for sets without a
        block.
      slot: (B, T), the token's position among the concatenated further blocks; their length for other tokens.
      read: (B, T), its position among the concatenated blocks that further blocks follow; their length for other
        tokens.
    """

    is_first: Bool[Array, "B T"]
    place: Int[Array, "B T"]
    starts: Int[Array, "B further"]
    before: Int[Array, "B C"]
    slot: Int[Array, "B T"]
    read: Int[Array, "B T"]

    @classmethod
    def of(cls, segment_ids: Int[Array, "B T"], block: int) -> PackedBlocks:
        """Returns the blocks of `block` tokens for rows whose sequences are runs of equal ids."""
        batch, length = segment_ids.shape
        further = -(-length // block) - 1
        token = jnp.arange(length, dtype=jnp.int32)[None]
        offset = places_in_sequences(segment_ids)
        place = offset % block
        begins = (offset > 0) & (place == 0)
        # Two further blocks start at least `block` tokens apart, so each piece of the row has at most one start.
        missing = (further + 1) * block - length
        candidates = jnp.pad(jnp.where(begins, token, length), ((0, 0), (0, missing)), constant_values=length)
        candidates = candidates.reshape(batch, further + 1, block).min(axis=2)
        starts = jnp.sort(candidates, axis=1)[:, :further]
        before = jnp.where(starts < length, jnp.take_along_axis(offset, starts, axis=1, mode="clip"), 0)
        number = jnp.cumsum(begins, axis=1, dtype=jnp.int32)  # further blocks that have begun so far
        is_first = offset < block
        beyond = further * block
        slot = jnp.where(is_first, beyond, (number - 1) * block + place)
        # Another block of the sequence follows a block if the first token after it belongs to the same sequence.
        after = jnp.minimum(token - place + block, length)
        followed = jnp.take_along_axis(jnp.pad(begins, ((0, 0), (0, 1))), after, axis=1)
        read = jnp.where(followed, number * block + place, beyond)
        return cls(is_first, place, starts, jnp.pad(before, ((0, 0), (1, 0))), slot, read)

    def sources(self, x: Float[Array, "B T D"], block: int) -> Float[Array, "B S D"] | None:
        """Returns the concatenated blocks that further blocks follow, or None if no sequence has a further block."""
        if not self.starts.shape[1]:
            return None
        return move(x, self._tokens(self.starts - block, block, self.starts < x.shape[1]), self.read)

    def further(self, x: Float[Array, "B T N H"], block: int) -> Float[Array, "B S N H"]:
        """Returns the further blocks' tokens, concatenated, with zeros where a sequence ends inside its block."""
        return move(x, self._own(block), self.slot)

    def back(self, y: Float[Array, "B S N H"], block: int) -> Float[Array, "B T N H"]:
        """Inverts `further`, with zeros for the tokens of first blocks."""
        return move(y, self.slot, self._own(block))

    def places(self, block: int | None) -> Int[Array, "rows places"]:
        """Returns positions inside blocks: of the row's tokens (B, T) without `block`; with it, of the row's tokens
        padded to whole blocks followed by the further blocks' tokens, each block a row of a batch
        (B (2 C - 1), block)."""
        if block is None:
            return self.place
        batch, length = self.place.shape
        further = self.starts.shape[1]
        row = jnp.pad(self.place, ((0, 0), (0, (further + 1) * block - length)))
        each = jnp.broadcast_to(
            jnp.tile(jnp.arange(block, dtype=jnp.int32), further), (batch, further * block)
        )
        return jnp.concatenate([row, each], axis=1).reshape(-1, block)

    def _own(self, block: int) -> Int[Array, "B S"]:
        length = self.slot.shape[1]
        tokens = self._tokens(self.starts, block, self.starts < length)
        there = jnp.take_along_axis(self.slot, tokens, axis=1, mode="clip")
        return jnp.where(there == jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens, length)

    def _tokens(self, starts: Array, block: int, exists: Array) -> Int[Array, "B S"]:
        """Returns the tokens of the blocks with these starts, or the row's length for blocks that do not exist. The
        last tokens may be beyond the row."""
        length = self.slot.shape[1]
        tokens = starts[:, :, None] + jnp.arange(block, dtype=jnp.int32)[None, None]
        return jnp.where(exists[:, :, None], tokens, length).reshape(starts.shape[0], -1)


def move(x: Float[Array, "B T ..."], source: Int[Array, "B S"], target: Int[Array, "B T"]) -> Array:
    """Moves rows of x (B, T, ...): out[b, s] = x[b, source[b, s]], 0 where source is T or larger.

    `target` is the inverse, the row of out for each row of x (S if x's row is dropped). It makes the gradient another
    `move`, which is a gather; the gradient of an indexed read would be a scatter.
    """
    return by_platform(
        lambda *_: Form(_run_move, _move_back),
        x,
        source,
        target,
        results=jax.ShapeDtypeStruct((*source.shape, *x.shape[2:]), x.dtype),
        plain=lambda x, source, target: _take(x, source),
    )


def _run_move(x: Array, source: Array, target: Array) -> tuple[Array, tuple[()]]:
    return _take(x, source), ()


def _move_back(operands: Any, result: Array, kept: Any, d_result: Array) -> tuple[Array, None, None]:
    return _take(d_result, operands[2]), None, None


def _take(x, places):
    places = places.reshape(*places.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, places, axis=1, mode="fill", fill_value=0)
