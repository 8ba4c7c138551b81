"""Heads split into a global part and a window part, as a layer; the cache keeps only a window of the window part's
keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.state import KeyValueCache, slide, window_segments
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.attention.structured.global_window import global_window_attention
from brl_jax.attention.structured.mlr_levels import check_ranks, score_scales
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import project_qkv
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class GlobalWindowConfig(Mechanism):
    """The sum of two softmax attentions, over the whole sequence and over a window, each on its slice of the head (a
    baseline of arXiv:2509.07963)."""

    packs: ClassVar[bool] = True

    window: Count = 129
    """Width w: a token sees itself and the w - 1 tokens before it in a decoder, or w // 2 on each side in an encoder.
    The paper's window of 128 has 129 keys."""
    ranks: tuple[int, int] | None = None
    """Features of the global and the window part, which sum to the head dimension; None for halves."""
    score_scale: float | None = None
    """A part's scores are its products times this, over its number of features; muP uses 8 for heads of 64
    (arXiv:2509.07963, E.2). None divides by the root of that number, as softmax attention does. In smaller heads, 8
    makes scores too sharp to learn from (docs/recall.md)."""
    qk_norm: bool = False
    """Whether to normalise queries and keys over the whole head before they are rotated and split."""

    def parts(self, head_dim: int) -> tuple[int, int]:
        return (head_dim - head_dim // 2, head_dim // 2) if self.ranks is None else self.ranks

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        check_ranks(self.parts(dimensions.head_dim), dimensions.head_dim)


class GlobalWindowCache(NamedTuple):
    """The two parts' caches.

    Attributes:
      past: the global part's keys (B, S, K, R) and the values (B, S, K, H) of all tokens so far.
      window_key: (B, W, K, H - R), the window part's last keys, newest last.
    """

    past: KeyValueCache
    window_key: Float[Array, "B W K F"]

    @property
    def length(self) -> Int[Array, ""]:
        return self.past.length


class GlobalWindowAttention(AttentionLayer, config=GlobalWindowConfig):
    mechanism: GlobalWindowConfig

    def init_cache(self, batch: int, length: int) -> GlobalWindowCache:
        """Returns a cache for `length` tokens: their values and global keys, and a window of the other keys."""
        d, m = self.dimensions, self.mechanism
        ranks = m.parts(d.head_dim)
        shape = (batch, length, d.num_kv_heads)
        window_key = jnp.zeros((batch, min(m.window, length + 1) - 1, d.num_kv_heads, ranks[1]), d.dtype)
        past = KeyValueCache.empty((*shape, ranks[0]), (*shape, d.head_dim), d.dtype)
        return GlobalWindowCache(past, window_key)

    def scales(self) -> tuple[float, float]:
        """Returns the scales of the two parts' scores."""
        m = self.mechanism
        everywhere, near = score_scales(m.score_scale, m.parts(self.dimensions.head_dim))
        return everywhere, near

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        heads = project_qkv(d, x, call.positions, qk_norm=m.qk_norm, root_scores=m.score_scale is None)
        function = functools.partial(
            global_window_attention, ranks=m.parts(d.head_dim), window=m.window, scale=self.scales()
        )
        return Attention(function, *heads)

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, GlobalWindowCache]:
        d, m, scale = self.dimensions, self.mechanism, self.scales()
        first = m.parts(d.head_dim)[0]
        query, key, value = attention.query, attention.key, attention.value
        batch, length = query.shape[:2]
        cache, start, reach = call.cache, call.start, call.cache.window_key.shape[1]
        # Write before anything reads the values; otherwise XLA copies them.
        past = cache.past.append(key[..., :first], value, call.count)
        # The window's values. Places before the first token may hold anything, as no query sees them.
        recent = jnp.maximum(start - reach + jnp.arange(reach, dtype=jnp.int32), 0)
        near_value = jnp.swapaxes(jnp.take(past.values, recent, axis=2), 1, 2)
        near_key, window_key = slide(cache.window_key, key[..., first:], call.num_new(length))
        near = local_attention(
            query[..., first:],
            near_key,
            jnp.concatenate([near_value, value], axis=1),
            scale=scale[1],
            pattern=SlidingWindow.of_width(m.window, is_causal=True),
            segment_ids=window_segments(batch, length, reach, start),
            query_offset=reach,
            **options,
        )
        everywhere = feature_attention(
            query[..., :first] * jnp.asarray(scale[0], query.dtype),
            past.key,
            past.value,
            is_causal=True,
            query_offset=start,
        )
        return everywhere + near, GlobalWindowCache(past, window_key)
