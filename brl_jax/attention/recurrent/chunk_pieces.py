"""Chunks with fixed boundaries whose tokens arrive in pieces, as they do during generation.

For `mixed_chunk_attention` and `bsbr_attention` the chunk boundaries change the result: they are counted from the
first token of the sequence. A piece of at most C new tokens may begin anywhere in a chunk of C tokens, so it lies in
that chunk, which is partly filled, and perhaps in the next one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.recurrent.rows import zero_unless


class PiecePositions(NamedTuple):
    """The positions of L new tokens and of the keys that they may see, counted from the current chunk's first token.

    The S = C + L keys are the C slots of the current chunk followed by the L new tokens.

    Attributes:
      query: positions of the new tokens.
      key: positions of the keys.
      key_exists: whether a key is a token; slots that are not filled yet and padding are not.
      kept_key: for each slot of the chunk that is current after the piece, the index of the key that it holds.
      kept: whether that slot holds a token.
      total: tokens since the beginning of the current chunk, including the new ones.
      new: the number of new tokens that exist.
    """

    query: Int[Array, "B L"]
    key: Int[Array, "B S"]
    key_exists: Bool[Array, "B S"]
    kept_key: Int[Array, "B C"]
    kept: Bool[Array, "B C"]
    total: Int[Array, "B"]
    new: Int[Array, "B"]

    def visible_in_chunk(self, chunk_size: int) -> Bool[Array, "B L S"]:
        """Whether a new token sees each of the keys as an earlier token of its own chunk, or itself."""
        same = self.query[..., None] // chunk_size == self.key[:, None] // chunk_size
        return self.key_exists[:, None] & same & (self.key[:, None] <= self.query[..., None])

    def in_completed_chunk(self, chunk_size: int) -> Bool[Array, "B S"]:
        """Whether a key belongs to the current chunk and the new tokens complete that chunk."""
        return self.key_exists & (self.key < chunk_size) & (self.total >= chunk_size)[:, None]

    def unfinished_chunk(
        self, slots: Float[Array, "B C K H"], new: Float[Array, "B L K H"]
    ) -> Float[Array, "B C K H"]:
        """The content of the chunk that is unfinished after the piece, from the old slots and the new tokens."""
        both = jnp.concatenate([slots, new], axis=1)
        return zero_unless(self.kept, jnp.take_along_axis(both, self.kept_key[..., None, None], axis=1))


def locate_piece(
    filled: Int[Array, "B"], length: int, exists: Bool[Array, "B L"] | None, chunk_size: int
) -> PiecePositions:
    """The positions of `length` new tokens after the `filled` tokens of the current chunk."""
    batch = filled.shape[0]
    steps = jnp.arange(length, dtype=jnp.int32)[None]
    slots = jnp.arange(chunk_size, dtype=jnp.int32)[None]
    exists = jnp.ones((batch, length), bool) if exists is None else exists
    new = jnp.sum(exists, axis=1, dtype=jnp.int32)
    query = filled[:, None] + steps
    key = jnp.concatenate([jnp.broadcast_to(slots, (batch, chunk_size)), query], axis=1)
    key_exists = jnp.concatenate([slots < filled[:, None], exists], axis=1)
    total = filled + new
    # A slot of the unfinished chunk holds an old token or one of the new tokens, which follow the filled slots.
    position = slots + jnp.where(total >= chunk_size, chunk_size, 0)[:, None]
    kept_key = jnp.where(position < filled[:, None], position, chunk_size + position - filled[:, None])
    kept_key = jnp.minimum(kept_key, chunk_size + length - 1)
    return PiecePositions(query, key, key_exists, kept_key, position < total[:, None], total, new)
