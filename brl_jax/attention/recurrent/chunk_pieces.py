"""Chunks with fixed boundaries whose tokens arrive in pieces, as in generation.

In `mixed_chunk_attention` and `bsbr_attention` the chunk boundaries change the result, so chunks are counted from the
first token of the sequence. A piece of at most C new tokens may start anywhere in a chunk of C tokens. It fills up that
chunk and perhaps begins the next one. A GPU reads a longer prompt at once: it moves the new tokens behind the
current chunk, so that the chunks of the result are the chunks of the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.recurrent.chunk_scan import scan_chunks
from brl_jax.attention.recurrent.rows import zero_unless


def read_pieces(
    step: Callable[..., Any],
    prompt: Callable[[Any, dict[str, Array], Any], Any],
    state: Any,
    inputs: dict[str, Array],
    segments: Int[Array, "B T"] | None,
    *,
    chunk_size: int,
) -> tuple[Any, Float[Array, "B T N V"]]:
    """The state and the outputs after new tokens: a GPU calls `prompt` for more than a chunk of them, the others
    `step` for each piece."""
    pieces = functools.partial(scan_chunks, step, chunk_size=chunk_size)
    if inputs["query"].shape[1] <= chunk_size:
        return pieces(state, inputs, segments)
    state = vary_like(state, jax.tree.leaves(inputs))
    return branches(state, inputs, segments, cuda=prompt, rocm=prompt, default=pieces)


class PiecePositions(NamedTuple):
    """Positions of L new tokens and of the keys they may see, counted from the current chunk's first token.

    The S = C + L keys are the C slots of the current chunk, then the L new tokens.

    Attributes:
      query: positions of the new tokens.
      key: positions of the keys.
      key_exists: whether a key is a token; empty slots and padding are not.
      kept_key: for each slot of the chunk that is current after the piece, the index of its key.
      kept: whether that slot holds a token.
      total: tokens since the beginning of the current chunk, including the new ones.
      new: the number of valid new tokens.
    """

    query: Int[Array, "B L"]
    key: Int[Array, "B S"]
    key_exists: Bool[Array, "B S"]
    kept_key: Int[Array, "B C"]
    kept: Bool[Array, "B C"]
    total: Int[Array, "B"]
    new: Int[Array, "B"]

    def visible_in_chunk(self, chunk_size: int) -> Bool[Array, "B L S"]:
        """Whether a new token sees each key: earlier tokens of the same chunk, and itself."""
        same = self.query[..., None] // chunk_size == self.key[:, None] // chunk_size
        return self.key_exists[:, None] & same & (self.key[:, None] <= self.query[..., None])

    def in_completed_chunk(self, chunk_size: int) -> Bool[Array, "B S"]:
        """Whether a key belongs to the current chunk and the new tokens complete that chunk."""
        return self.key_exists & (self.key < chunk_size) & (self.total >= chunk_size)[:, None]

    def unfinished_chunk(
        self, slots: Float[Array, "B C K H"], new: Float[Array, "B L K H"]
    ) -> Float[Array, "B C K H"]:
        """The contents of the chunk that is current after the piece, from the old slots and the new tokens."""
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
    # A slot of the unfinished chunk holds an old token, or a new one, which comes after the filled slots.
    position = slots + jnp.where(total >= chunk_size, chunk_size, 0)[:, None]
    kept_key = jnp.where(position < filled[:, None], position, chunk_size + position - filled[:, None])
    kept_key = jnp.minimum(kept_key, chunk_size + length - 1)
    return PiecePositions(query, key, key_exists, kept_key, position < total[:, None], total, new)


class AlignedPrompt(NamedTuple):
    """The places of T new tokens among C + T places that begin with the current chunk's first token.

    Attributes:
      filled: tokens in the current chunk before the prompt.
      new: the number of valid new tokens.
      length: T.
      chunk_size: C.
    """

    filled: Int[Array, "B 1"]
    new: Int[Array, "B 1"]
    length: int
    chunk_size: int

    @property
    def total(self) -> Int[Array, "B 1"]:
        """Tokens since the beginning of the current chunk, including the new ones."""
        return self.filled + self.new

    @property
    def complete(self) -> Int[Array, "B 1"]:
        """How many of these tokens are in complete chunks."""
        return self.total // self.chunk_size * self.chunk_size

    @property
    def places(self) -> Int[Array, "1 P"]:
        return jnp.arange(self.chunk_size + self.length, dtype=jnp.int32)[None]

    def move(
        self, new: Shaped[Array, "B T *rest"], slots: Shaped[Array, "B C *rest"] | None = None
    ) -> Shaped[Array, "B P *rest"]:
        """The tokens at their places, 0 elsewhere; `slots` are the current chunk's tokens, if kept."""
        if slots is None:
            slots = jnp.zeros((new.shape[0], self.chunk_size, *new.shape[2:]), new.dtype)
        behind = self.chunk_size + jnp.maximum(self.places - self.filled, 0)
        index = jnp.where(self.places < self.filled, self.places, behind)
        return _pick(jnp.concatenate([slots, new], axis=1), index, self.places < self.total)

    def unfinished_chunk(self, moved: Shaped[Array, "B P *rest"]) -> Shaped[Array, "B C *rest"]:
        """The contents of the chunk that is current after the prompt."""
        kept = self.complete + jnp.arange(self.chunk_size, dtype=jnp.int32)[None]
        return _pick(moved, kept, kept < self.total)

    def restore(self, moved: Shaped[Array, "B P *rest"]) -> Shaped[Array, "B T *rest"]:
        """The new tokens in the order of the prompt."""
        return _pick(moved, self.filled + jnp.arange(self.length, dtype=jnp.int32)[None], None)


def align_prompt(
    before: Int[Array, "B"], length: int, segments: Int[Array, "B T"] | None, chunk_size: int
) -> AlignedPrompt:
    """The places of `length` new tokens after `before` earlier ones; padding has segment -1."""
    filled = (before % chunk_size)[:, None]
    new = jnp.full_like(filled, length)
    if segments is not None:
        new = jnp.sum(segments >= 0, axis=1, keepdims=True, dtype=jnp.int32)
    return AlignedPrompt(filled, new, length, chunk_size)


def _pick(x: Array, index: Array, exists: Array | None) -> Array:
    """The tokens at the indices, and 0 where none exists. Indices past the end read the last token."""
    index = jnp.minimum(index, x.shape[1] - 1).reshape(*index.shape, *(1,) * (x.ndim - 2))
    return zero_unless(exists, jnp.take_along_axis(x, index, axis=1))
