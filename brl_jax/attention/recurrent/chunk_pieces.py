"""Chunks with fixed boundaries whose tokens arrive in pieces, as in generation.

In `mixed_chunk_attention` and `bsbr_attention` the chunk boundaries change the result, so chunks are counted from the
first token of the sequence. A few new tokens are read one by one. A longer prompt is read at once: its tokens move
behind the current chunk, so that the chunks of the result are the chunks of the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from brl_jax.attention.core.by_platform import branches
from brl_jax.attention.core.state import write_places
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.recurrent.chunk_scan import scan_chunks
from brl_jax.attention.recurrent.rows import zero_unless

# Up to this many new tokens are read one by one, except on a GPU.
_FEW = 8


def read_new(
    token: Callable[..., Any],
    prompt: Callable[[Any, dict[str, Array], Any], Any],
    state: Any,
    inputs: dict[str, Array],
    segments: Int[Array, "B T"] | None,
) -> tuple[Any, Float[Array, "B T N V"]]:
    """The state and the outputs after new tokens: `token` reads a few of them one by one, `prompt` many at once. A GPU,
    which would wait for the kernel launches of each token, reads all but a single one at once."""
    one_by_one = functools.partial(scan_chunks, token, chunk_size=1)
    length = inputs["query"].shape[1]
    if length == 1:
        return one_by_one(state, inputs, segments)
    state = vary_like(state, jax.tree.leaves(inputs))
    if length > _FEW:
        return prompt(state, inputs, segments)
    return branches(state, inputs, segments, cuda=prompt, rocm=prompt, default=one_by_one)


class ChunkToken(NamedTuple):
    """The place of one new token in its chunk of C tokens, in each row.

    Attributes:
      chunk, place: the chunk's number, and the token's position in it.
      exists: whether the token is valid.
      completes: whether it is valid and the chunk's last.
    """

    chunk: Int[Array, "B"]
    place: Int[Array, "B"]
    exists: Bool[Array, "B"]
    completes: Bool[Array, "B"]

    @classmethod
    def of(cls, before: Int[Array, "B"], enters: Bool[Array, "B 1"] | None, chunk_size: int) -> ChunkToken:
        """The place after `before` tokens of the sequence."""
        place = before % chunk_size
        exists = jnp.ones(before.shape, bool) if enters is None else enters[:, 0]
        return cls(before // chunk_size, place, exists, exists & (place == chunk_size - 1))

    def put(self, slots: Float[Array, "B C K H"], new: Float[Array, "B 1 K H"]) -> Float[Array, "B C K H"]:
        """The chunk's tokens with the new one."""
        return write_places(slots, new, jnp.where(self.exists, self.place, slots.shape[1])[:, None])

    def kept(self, slots: Float[Array, "B C K H"]) -> Float[Array, "B C K H"]:
        """What the state keeps of the chunk's tokens: nothing once it is complete."""
        return zero_unless(~self.completes, slots)

    def sees(self, chunk_size: int) -> Bool[Array, "B 1 C"]:
        """Which of the chunk's tokens the new one sees: those before it, and itself."""
        return (jnp.arange(chunk_size, dtype=jnp.int32)[None] <= self.place[:, None])[:, None]


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
