"""The past that BRL's compressed tokens read: the training memory and the decoding caches."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.caches import WindowCache


class BRLMemory(NamedTuple):
    """The last tokens' rows of D features, as a training memory without gradient.

    Attributes:
      history: (B, P, D), newest last; P is `BRLConfig.history`.
      filled: () int32; only the last `filled` rows are valid.
    """

    history: Float[Array, "B P D"]
    filled: Int[Array, ""]

    @classmethod
    def empty(cls, batch: int, size: int, width: int, dtype: Any) -> BRLMemory:
        return cls(jnp.zeros((batch, size, width), dtype), jnp.zeros((), jnp.int32))

    @property
    def length(self) -> int:
        """0, as its tokens have no positions."""
        return 0

    def append(self, new: Float[Array, "B T D"]) -> BRLMemory:
        """Returns the memory after these tokens."""
        size, length = self.history.shape[1], new.shape[1]
        new = new[:, max(length - size, 0) :].astype(self.history.dtype)
        history = jnp.concatenate([self.history[:, length:], new], axis=1) if length < size else new
        return BRLMemory(jax.lax.stop_gradient(history), jnp.minimum(self.filled + length, size))


class BRLPast(NamedTuple):
    """`BRLMemory` for generation, where the current block may be incomplete. In the methods, `num_tokens` is the number
    of tokens so far, which gives the position in the current block.

    Attributes:
      before: what precedes the current block.
      current: (B, block_size, D), the current block's tokens, padded to a whole block.
    """

    before: BRLMemory
    current: Float[Array, "B block D"]

    @classmethod
    def empty(cls, batch: int, size: int, block_size: int, width: int, dtype: Any) -> BRLPast:
        current = jnp.zeros((batch, block_size, width), dtype)
        return cls(BRLMemory.empty(batch, size, width, dtype), current)

    def recent(self, num_tokens: Int[Array, ""]) -> BRLMemory:
        """Returns what precedes the next token: the last tokens of [before | current]."""
        size, block = self.before.history.shape[1], self.current.shape[1]
        both = jnp.concatenate([self.before.history, self.current], axis=1)
        offset = num_tokens % block
        history = jax.lax.dynamic_slice_in_dim(both, offset, size, axis=1)
        return BRLMemory(history, jnp.minimum(self.before.filled + offset, size))

    def memory(self, num_tokens: Int[Array, ""]) -> BRLMemory:
        """Returns the training memory after these tokens."""
        history, filled = self.recent(num_tokens)
        return BRLMemory(jax.lax.stop_gradient(history), filled)

    def extend(self, num_tokens: Int[Array, ""], new: Float[Array, "B T D"]) -> Float[Array, "B S D"]:
        """Returns [before | current block | padding], with the new tokens at their positions."""
        block = self.current.shape[1]
        # The new tokens may start anywhere in the current block, and the block after the last of them must fit.
        blocks = (new.shape[1] + block - 2) // block + 1
        tokens = jnp.pad(self.current, ((0, 0), (0, blocks * block), (0, 0)))
        tokens = jax.lax.dynamic_update_slice_in_dim(
            tokens, new.astype(tokens.dtype), num_tokens % block, axis=1
        )
        return jnp.concatenate([self.before.history, tokens], axis=1)

    def advance(self, num_tokens: Int[Array, ""], new: Float[Array, "B T D"], count: Any) -> BRLPast:
        """Returns the past after the first `count` of the new tokens."""
        size, block = self.before.history.shape[1], self.current.shape[1]
        both = self.extend(num_tokens, new)
        # How many tokens the start of the current block moves forward.
        shift = (num_tokens % block + count) // block * block
        history = jax.lax.stop_gradient(jax.lax.dynamic_slice_in_dim(both, shift, size, axis=1))
        return BRLPast(
            BRLMemory(history, jnp.minimum(self.before.filled + shift, size)),
            jax.lax.dynamic_slice_in_dim(both, size + shift, block, axis=1),
        )


class BRLCache(NamedTuple):
    """Decoding cache of a layer.

    Attributes:
      window: of the local attention.
      key, value: (B, M, N, H), from the current block's compressed tokens.
      length: () int32, the number of tokens so far.
      past: the layer's inputs, for memory "layer"; None for memory "output".
    """

    window: WindowCache
    key: Float[Array, "B M N H"]
    value: Float[Array, "B M N H"]
    length: Int[Array, ""]
    past: BRLPast | None


class BRLCarrierCache(NamedTuple):
    """Decoding cache of a carrier.

    Attributes:
      length: () int32, the number of tokens so far.
      past: the network's outputs, for memory "output"; None for memory "layer".
    """

    length: Int[Array, ""]
    past: BRLPast | None


class BRLCarry(NamedTuple):
    """What passes from layer to layer.

    Attributes:
      tokens: (B, C, M, E), the compressed tokens of each block.
      source: what they read in every layer, for memory "output": the last network outputs (B, P, D) in a decoder, the
        network's input (B, T, D) in an encoder. None for memory "layer", where each layer reads its own input.
      filled: () int32; only the last `filled` rows of a decoder's source are valid.
    """

    tokens: Float[Array, "B C M E"]
    source: Float[Array, "B P D"] | None = None
    filled: Any = None
