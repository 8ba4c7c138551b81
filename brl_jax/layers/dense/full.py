"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.dense.full import full_attention
from brl_jax.layers.core.modules import merge_heads, project_qkv, sow_weights
from brl_jax.layers.core.protocol import Call, Dimensions, Mechanism, MemorylessLayer


@dataclasses.dataclass(frozen=True)
class FullConfig(Mechanism):
    """Softmax attention over all tokens (all earlier ones in a decoder), quadratic in the length."""

    @property
    def packs(self) -> bool:
        return True

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return FullAttention(self, dimensions, **kwargs)


class FullAttention(MemorylessLayer):
    """See `brl_jax.layers.core.protocol` for the call and `full_attention` for the mathematics."""

    mechanism: Mechanism
    dimensions: Dimensions

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, **kwargs: Any) -> jax.Array:
        """The attention function itself, for mechanisms that differ in nothing else."""
        return full_attention(query, key, value, **kwargs)

    def init_cache(self, batch: int, length: int) -> dict[str, jax.Array]:
        """Room for the keys and values of `length` tokens."""
        d = self.dimensions
        shape = (batch, length, d.num_kv_heads, d.head_dim)
        return {
            "key": jnp.zeros(shape, d.dtype),
            "value": jnp.zeros(shape, d.dtype),
            "index": jnp.zeros((), jnp.int32),
        }

    def mix(self, x: Float[Array, "B T D"], call: Call) -> tuple[Array, Any]:
        d = self.dimensions
        cache, start, length = call.cache, call.start, x.shape[1]
        query, key, value = project_qkv(d, x, call.positions)
        if cache is None:
            attend = functools.partial(
                self.attend,
                query,
                key,
                is_causal=d.is_causal,
                key_value_seq_lengths=None if d.is_causal else call.lengths,
                segment_ids=call.segment_ids,
                implementation=d.implementation,
            )
            sow_weights(self, attend, value)
            return merge_heads(d, attend(value)), None
        # New tokens that don't exist are written nowhere: their slots lie past the end and are dropped.
        slots = start + jnp.arange(length, dtype=jnp.int32)
        if call.count is not None:
            slots = jnp.where(jnp.arange(length) < call.count, slots, cache["key"].shape[1])
        cache = {
            "key": cache["key"].at[:, slots].set(key, mode="drop"),
            "value": cache["value"].at[:, slots].set(value, mode="drop"),
            "index": start + call.new(length),
        }
        attended = self.attend(
            query,
            cache["key"],
            cache["value"],
            is_causal=True,
            query_offset=start,
            implementation=d.implementation,
        )
        return merge_heads(d, attended), cache
