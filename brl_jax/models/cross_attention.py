"""Cross-attention of a decoder to an encoder: to all outputs, or to a window and the encoder's compressed tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.compressed.propagate import propagate
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.fields import Checked, Count
from brl_jax.layers.core.modules import dense, merge_heads, parameter, rotated, scale_scores, to_heads
from brl_jax.layers.core.protocol import Dimensions, token_positions

# Initial strength of the compressed tokens; BRL's propagation starts with the same value.
_STRENGTH = 0.5


@dataclasses.dataclass(frozen=True)
class CrossConfig(Checked):
    """What a decoder's tokens see of the encoder's outputs."""

    window: Count | None = None
    """Token t of the decoder sees the encoder's tokens t - window // 2 to t + window // 2; None: all of them."""
    rope: bool = False
    """Whether to rotate queries and keys by their positions, counted from the start of each sequence. If not, the
    encoder's outputs must carry positions themselves."""


class Encoded(NamedTuple):
    """What a decoder reads from an encoder.

    Attributes:
      outputs: (B, S, D), the encoder's outputs.
      lengths: (B,) ints; the first `lengths[b]` outputs of row b are valid and the rest are ignored. None: all.
      compressed: (B, M, E), the encoder's compressed tokens (BRL), or None if the decoder does not read them.
    """

    outputs: Any
    lengths: Any = None
    compressed: Any = None


class CrossSizes(NamedTuple):
    """How many encoder outputs and compressed tokens (0: none are read) a decoder reads from each row."""

    length: int
    compressed: int = 0


class CrossCache(NamedTuple):
    """The keys and values of one layer's cross-attention, computed once per generation.

    Attributes:
      key, value: (B, S, K, H).
      lengths: (B,) int32, how many keys of each row are valid.
      compressed_key, compressed_value: (B, M, N, H), from the compressed tokens, or None.
    """

    key: Any
    value: Any
    lengths: Any
    compressed_key: Any = None
    compressed_value: Any = None

    @classmethod
    def empty(cls, batch: int, sizes: CrossSizes, dimensions: Dimensions) -> CrossCache:
        """A cache of zeros; the first call fills it."""
        d = dimensions
        tokens = jnp.zeros((batch, sizes.length, d.num_kv_heads, d.head_dim), d.dtype)
        compressed = jnp.zeros((batch, sizes.compressed, d.num_heads, d.head_dim), d.dtype)
        pair = (compressed, compressed) if sizes.compressed else (None, None)
        return cls(tokens, tokens, jnp.zeros((batch,), jnp.int32), *pair)


class CrossCall(NamedTuple):
    """What each block of a decoder gets for its cross-attention.

    Attributes:
      encoded: what to read; None reads the keys and values in the cache.
      start: () int32, how many of the decoder's tokens precede this call; None for 0.
    """

    encoded: Encoded | None
    start: Any = None


class CrossAttention(nn.Module):
    """Softmax attention from x (B, T, D) to an encoder's outputs (B, S, D), all of them or an aligned window (Vaswani
    et al. 2017, arXiv:1706.03762, section 3.2.3). A token that sees no output gets zeros.

    If the encoder also has compressed tokens, BRL-Attention's propagation reads them with a learned strength for each
    head (Liu et al., OpenReview Vpyg3fqXbl, equations 8 and 9), and the two results are added before the output
    projection: F_BRL = F_gen + F_prop, over the encoder's tokens instead of the decoder's. With a window, time and
    memory are then linear in T + S, and the compressed tokens cover what lies outside the window.
    """

    config: CrossConfig
    dimensions: Dimensions

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], call: CrossCall, cache: CrossCache | None = None
    ) -> tuple[Float[Array, "B T D"], CrossCache | None]:
        """Returns the output and the cache; a call with `call.encoded` stores its keys and values there."""
        d = self.dimensions
        query = to_heads(d, x, "query")
        if self.config.rope:
            start = 0 if call.start is None else call.start
            query = rotated(d, query, token_positions(x.shape[1], start))
        read: Any = cache
        if call.encoded is not None:
            read = self._keys_and_values(call.encoded)
            if cache is not None:
                batch, length = read.key.shape[:2]
                full = jnp.full((batch,), length, jnp.int32)
                cache = read._replace(
                    lengths=full if read.lengths is None else read.lengths.astype(jnp.int32)
                )
        query = scale_scores(query, d.head_score_factor)
        attended = self._attend(query, read, call.start)
        if read.compressed_key is not None:
            attended = attended + self._propagate(x, read.compressed_key, read.compressed_value)
        return merge_heads(d, attended), cache

    def _keys_and_values(self, encoded: Encoded) -> CrossCache:
        d, outputs = self.dimensions, encoded.outputs
        key, value = (to_heads(d, outputs, name, "kv_heads") for name in ("key", "value"))
        if self.config.rope:
            key = rotated(d, key, token_positions(outputs.shape[1]))
        if encoded.compressed is None:
            return CrossCache(key, value, encoded.lengths)
        heads, axes = (d.num_heads, d.head_dim), ("compressed_embed", "heads", "head_dim")
        offered = (
            dense(d, heads, axes, name=f"compressed_{name}")(encoded.compressed) for name in ("key", "value")
        )
        return CrossCache(key, value, encoded.lengths, *offered)

    def _attend(
        self, query: Float[Array, "B T N H"], read: CrossCache, start: Any
    ) -> Float[Array, "B T N H"]:
        d, window = self.dimensions, self.config.window
        # Full attention has no Pallas kernel, but a network may request "pallas" for its mechanism.
        dense_one = d.implementation if d.implementation in ("xla", "cudnn") else None
        if window is None:
            return full_attention(
                query, read.key, read.value, key_value_seq_lengths=read.lengths, implementation=dense_one
            )
        side = window // 2
        if start is None:
            return local_attention(
                query, read.key, read.value, pattern=SlidingWindow(side, side), key_value_seq_lengths=read.lengths,
                implementation=d.implementation,
            )  # fmt: skip
        # Generation, from any position: slice out the keys that these tokens can see.
        length, available = query.shape[1], read.key.shape[1]
        size = min(available, length + 2 * side)
        first = jnp.clip(start - side, 0, available - size)
        key, value = (jax.lax.dynamic_slice_in_dim(a, first, size, axis=1) for a in (read.key, read.value))
        place = first + jnp.arange(size, dtype=jnp.int32)
        distance = place[None] - token_positions(length, start)[0][:, None]
        exists = True if read.lengths is None else (place[None] < read.lengths[:, None])[:, None, None]
        mask = (jnp.abs(distance) <= side)[None, None] & exists
        return full_attention(query, key, value, mask=mask, implementation=dense_one)

    def _propagate(
        self, x: Float[Array, "B T D"], key: Float[Array, "B M N H"], value: Float[Array, "B M N H"]
    ) -> Float[Array, "B T N H"]:
        d = self.dimensions
        query = to_heads(d, x, "compressed_query")
        init = nn.initializers.constant(_STRENGTH)
        strength = parameter(self, "lambda", init, (d.num_heads,), ("heads",))
        query = scale_scores(query, d.head_score_factor)
        return propagate(query, key, value, strength=strength, implementation=d.implementation)
