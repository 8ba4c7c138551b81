"""Heads split in a global and a window part as a layer, with a window's keys only for the second."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import check_at_least
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.attention.structured.global_window import (
    check_split,
    global_window_attention,
    split_window,
    window_part,
)
from brl_jax.layers.core.modules import merge_heads, project_qkv, sow_weights
from brl_jax.layers.core.protocol import Call, Dimensions, Mechanism, MemorylessLayer


@dataclasses.dataclass(frozen=True)
class GlobalWindowConfig(Mechanism):
    """Two softmax attentions added, over everything and over a window, each by its own slice of the head (a comparison
    of 002)."""

    window: int = 128
    """Width w: the window holds w + 1 keys, a decoder's token and the w before it, or w // 2 on both sides."""
    ranks: tuple[int, int] | None = None
    """Features of the global and of the window part, which sum to the head's; None for halves."""
    score_scale: float = 8.0
    """Scores are products times this over the part's rank."""

    def __post_init__(self):
        check_at_least(self, "window")

    @property
    def packs(self) -> bool:
        return True

    def parts(self, head_dim: int) -> tuple[int, int]:
        return (head_dim - head_dim // 2, head_dim // 2) if self.ranks is None else self.ranks

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        check_split(self.parts(dimensions.head_dim), dimensions.head_dim)

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return GlobalWindowAttention(self, dimensions, **kwargs)


class GlobalWindowAttention(MemorylessLayer):
    """See `brl_jax.layers.core.protocol` for the call and `global_window_attention` for the mathematics."""

    mechanism: GlobalWindowConfig
    dimensions: Dimensions

    def init_cache(self, batch: int, length: int) -> dict[str, Array]:
        """Room for the global part's keys and the values of `length` tokens, and for a window of the other keys,
        newest last."""
        d, m = self.dimensions, self.mechanism
        ranks = m.parts(d.head_dim)
        shape = (batch, length, d.num_kv_heads)
        reach = min(m.window, length)
        return {
            "key": jnp.zeros((*shape, ranks[0]), d.dtype),
            "window_key": jnp.zeros((batch, reach, d.num_kv_heads, ranks[1]), d.dtype),
            "value": jnp.zeros((*shape, d.head_dim), d.dtype),
            "index": jnp.zeros((), jnp.int32),
        }

    def mix(self, x: Float[Array, "B T D"], call: Call) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        query, key, value = project_qkv(d, x, call.positions, root_scores=False)
        ranks = m.parts(d.head_dim)
        scale = (m.score_scale / ranks[0], m.score_scale / ranks[1])
        if call.cache is not None:
            attended, cache = self.step(query, key, value, call.cache, scale, call.count)
            return merge_heads(d, attended), cache
        attend = functools.partial(
            global_window_attention,
            query,
            key,
            ranks=ranks,
            window=m.window,
            scale=scale,
            is_causal=d.is_causal,
            key_value_seq_lengths=None if d.is_causal else call.lengths,
            segment_ids=call.segment_ids,
            implementation=d.implementation,
        )
        sow_weights(self, attend, value)
        return merge_heads(d, attend(value)), None

    def step(self, query: Array, key: Array, value: Array, cache: Any, scale: Any, count: Any):
        """New tokens behind those in the cache: their outputs and the new cache."""
        d, m = self.dimensions, self.mechanism
        first = m.parts(d.head_dim)[0]
        batch, length = query.shape[:2]
        start, longest, reach = cache["index"], cache["key"].shape[1], cache["window_key"].shape[1]
        # Values of the window, then the new ones. Places before the first token hold anything and are not seen.
        recent = start - reach + jnp.arange(reach, dtype=jnp.int32)
        near_value = jnp.take(cache["value"], jnp.maximum(recent, 0), axis=1)
        near_key = jnp.concatenate([cache["window_key"], key[..., first:]], axis=1)
        seen = jnp.concatenate([recent >= 0, jnp.ones((length,), bool)]).astype(jnp.int32)[None]
        near = window_part(
            query[..., first:],
            near_key,
            jnp.concatenate([near_value, value], axis=1),
            scale=scale[1],
            pattern=split_window(m.window, is_causal=True),
            is_causal=True,
            segment_ids=(
                jnp.ones((batch, length), jnp.int32),
                jnp.broadcast_to(seen, (batch, reach + length)),
            ),
            query_offset=reach,
            implementation=d.implementation,
        )
        slots = start + jnp.arange(length, dtype=jnp.int32)
        if count is not None:
            slots = jnp.where(jnp.arange(length) < count, slots, longest)
        count = length if count is None else count
        cache = {
            "key": cache["key"].at[:, slots].set(key[..., :first], mode="drop"),
            "window_key": lax.dynamic_slice_in_dim(near_key, count, reach, axis=1),
            "value": cache["value"].at[:, slots].set(value, mode="drop"),
            "index": start + count,
        }
        everywhere = feature_attention(
            query[..., :first] * jnp.asarray(scale[0], query.dtype), cache["key"], cache["value"],
            is_causal=True, query_offset=start,
        )  # fmt: skip
        return everywhere + near, cache
