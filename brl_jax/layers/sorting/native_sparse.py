"""Native sparse attention as a layer; its cache has all tokens, the compressed blocks so far, and a window."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from brl_jax.attention.core.state import KeyValueCache, slide, write_places
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.sorting.native_sparse import (
    BlockSizes,
    Lists,
    Tokens,
    block_starts,
    compression_blocks,
    far_attention,
    mix_branches,
    native_sparse_attention,
)
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.caches import WindowCache
from brl_jax.layers.core.modules import (
    dense,
    merge_heads,
    parameter,
    rotated,
    scale_scores,
    sow_weights,
    to_heads,
)
from brl_jax.layers.core.protocol import LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class NativeSparseConfig(Mechanism):
    """Compressed blocks, whole blocks that they select, and a window (Native Sparse Attention, arXiv:2502.11089).

    For decoders only. The time for compressed blocks grows with length^2 / stride, and generation keeps all tokens."""

    bidirectional: ClassVar[bool] = False
    packs: ClassVar[bool] = True

    window: Count = 512
    """Width of the window [w]: a token and those before it."""
    compressed_size: Count = 32
    """Tokens in a compressed block [l]."""
    stride: Count = 16
    """Tokens from the start of one compressed block to the start of the next [d]."""
    selected_size: Count = 64
    """Tokens in a block that is selected as a whole [l']."""
    num_selected: Count = 16
    """Blocks that each token reads [n]: its own, the one before it, the first one, and the best of the others."""

    def __post_init__(self):
        for name in ("compressed_size", "selected_size"):
            if getattr(self, name) % self.stride:
                raise ValueError(
                    f"{name} must be a multiple of stride={self.stride}, got {getattr(self, name)}"
                )

    @property
    def sizes(self) -> BlockSizes:
        """The sizes in the form that the function takes."""
        return BlockSizes(self.compressed_size, self.stride, self.selected_size, self.num_selected)


class NativeSparseCache(NamedTuple):
    """A decoding cache.

    Attributes:
      tokens: keys and values of all tokens, whose blocks can be selected.
      window: keys and values of the window.
      recent: keys and values of the last compressed_size tokens, to be compressed; newest last.
      compressed: one key and value for each compressed block so far, with capacity for later ones.
    """

    tokens: KeyValueCache
    window: WindowCache
    recent: Tokens
    compressed: Tokens

    @property
    def length(self) -> Any:
        """The number of tokens so far, () int32."""
        return self.tokens.length


class NativeSparseAttention(MechanismLayer, config=NativeSparseConfig):
    """Each of the three branches has separate keys and values. A network with one hidden layer compresses a block,
    given its tokens and learned positions inside the block (eq. 7); all heads share it. A block's key has the position
    of its first token.
    """

    mechanism: NativeSparseConfig

    def init_cache(self, batch: int, length: int) -> NativeSparseCache:
        d, m = self.dimensions, self.mechanism

        def shape(tokens: int) -> tuple[int, ...]:
            return batch, tokens, d.num_kv_heads, d.head_dim

        def both(tokens: int) -> Tokens:
            return Tokens(jnp.zeros(shape(tokens), d.dtype), jnp.zeros(shape(tokens), d.dtype))

        blocks = block_starts(length, m.compressed_size, m.stride).shape[1]
        return NativeSparseCache(
            KeyValueCache.empty(shape(length), shape(length), d.dtype),
            WindowCache.empty(shape(min(m.window, length + 1) - 1), d.dtype),
            both(m.compressed_size),
            both(blocks),
        )

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        query = scale_scores(rotated(d, to_heads(d, x, "query"), call.positions), d.head_score_factor)
        project = functools.partial(to_heads, d, x, axis="kv_heads")
        tokens, window = (
            Tokens(rotated(d, project(name=f"{name}key"), call.positions), project(name=f"{name}value"))
            for name in ("", "window_")
        )
        raw = Tokens(project(name="compressed_key"), project(name="compressed_value"))
        gates = jax.nn.sigmoid(dense(d, (d.num_heads, 3), ("embed", "heads", "gates"), name="gates")(x))
        if call.cache is not None:
            out, cache = self._step(query, tokens, window, raw, gates, call)
            return merge_heads(d, out), cache
        blocks = Tokens(*(compression_blocks(a, m.sizes, call.segment_ids) for a in raw))
        starts = block_starts(x.shape[1], m.compressed_size, m.stride, call.segment_ids)
        rows = jnp.broadcast_to(call.positions, (starts.shape[0], x.shape[1]))
        if call.positions.shape[0] > 1:
            rows, starts = call.positions, jnp.broadcast_to(starts, (x.shape[0], starts.shape[1]))
        places = jnp.take_along_axis(rows, jnp.minimum(starts, x.shape[1] - 1), axis=1)
        compressed = self._compress(blocks, places)
        options: dict[str, Any] = {
            "sizes": m.sizes,
            "window": m.window,
            "segment_ids": call.segment_ids,
            "implementation": d.implementation,
        }

        def attend(value: Array, compressed_value: Array, window_value: Array) -> Array:
            return native_sparse_attention(
                query, tokens.key, value, compressed.key, compressed_value, gates,
                window_key=window.key, window_value=window_value, **options,
            )  # fmt: skip

        # The three branches have one matrix together, as if they shared values and compressed blocks to their means.
        blocks_of = functools.partial(compression_blocks, sizes=m.sizes, segment_ids=call.segment_ids)
        sow_weights(self, lambda value: attend(value, blocks_of(value).mean(2), value), tokens.value)
        out = attend(tokens.value, compressed.value, window.value)
        return merge_heads(d, out), None

    def _compress(self, blocks: Tokens, positions: Any) -> Tokens:
        """Returns one key and value (B, C, K, H) for each block of tokens (B, C, L, K, H), whose first tokens are at
        positions (B or 1, C)."""
        d = self.dimensions

        def apply(x: Array, name: str) -> Array:
            shape = (d.head_dim, x.shape[2])
            place = parameter(
                self, f"{name}_places", nn.initializers.normal(0.02), shape, ("head_dim", "block_tokens")
            )
            x = rearrange(x, "b c l k h -> b c k h l") + place.astype(x.dtype)[None, None, None]
            axes = ("head_dim", "block_tokens", "mlp")
            hidden = dense(d, d.head_dim, axes, name=f"{name}_hidden", contract=2)(x)
            return dense(d, d.head_dim, ("mlp", "head_dim"), name=f"{name}_out")(jax.nn.gelu(hidden))

        key, value = apply(blocks.key, "compress_key"), apply(blocks.value, "compress_value")
        return Tokens(rotated(d, key, positions), value)

    def _step(self, query, tokens, window, raw, gates, call: LayerCall):
        """Returns the branches' mixed outputs for new tokens, and the new cache."""
        d, m = self.dimensions, self.mechanism
        cache, start, length = call.cache, call.start, query.shape[1]
        count = call.num_new(length)
        kept = cache.tokens.append(*tokens, call.count)
        raw, recent = zip(*(slide(old, new, count) for old, new in zip(cache.recent, raw)))
        compressed = self._append_blocks(cache.compressed, Tokens(*raw), call, length)
        lists = Lists(
            jnp.arange(compressed.key.shape[1], dtype=jnp.int32)[None] * m.stride,
            block_starts(kept.key.shape[1], m.selected_size, m.selected_size),
            jnp.zeros(query.shape[:2], jnp.int32),
        )
        far, near = far_attention(
            query,
            compressed,
            Tokens(kept.key, kept.value),
            lists,
            m.sizes,
            d.head_dim**-0.5,
            start,
            aligned=True,
            implementation=d.implementation,
        )
        pattern = SlidingWindow(cache.window.key.shape[1], 0)
        attend = functools.partial(local_attention, pattern=pattern, is_causal=True)
        last, new = cache.window.attend(
            Attention(attend, query, *window), call, implementation=d.implementation
        )
        out = mix_branches(gates, far, near, last).astype(query.dtype)
        return out, NativeSparseCache(kept, new, Tokens(*recent), compressed)

    def _append_blocks(self, compressed: Tokens, raw: Tokens, call: LayerCall, length: int) -> Tokens:
        """Returns the compressed blocks with those that `length` new tokens complete. `raw` holds the compressed_size
        tokens before the new ones, then the new ones."""
        m, start = self.mechanism, call.start
        size, room = m.compressed_size, compressed.key.shape[1]
        first = jnp.maximum((start - size + m.stride) // m.stride, 0)
        numbers = first + jnp.arange(length // m.stride + 1, dtype=jnp.int32)
        begins = numbers * m.stride
        places = begins[:, None] - start + size + jnp.arange(size, dtype=jnp.int32)[None]
        places = jnp.clip(places, 0, size + length - 1)
        blocks = Tokens(*(jnp.take(x, places, axis=1) for x in raw))
        done = self._compress(blocks, call.positions[:, :1] - start + begins[None])
        slots = jnp.where(begins + size <= start + call.num_new(length), numbers, room)
        return Tokens(*(write_places(x, new, slots) for x, new in zip(compressed, done)))
