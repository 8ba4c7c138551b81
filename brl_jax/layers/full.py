"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.full import full_attention
from brl_jax.layers.common import merge_heads, project_qkv, sow_weights, token_positions
from brl_jax.layers.mechanism import Dimensions, Mechanism, MemorylessLayer, check_call


@dataclasses.dataclass(frozen=True)
class FullConfig(Mechanism):
    """Softmax attention over all tokens (all earlier ones in a decoder), quadratic in the length."""

    @property
    def packs(self) -> bool:
        return True

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return FullAttention(self, dimensions, **kwargs)


class FullAttention(MemorylessLayer):
    """See `brl_jax.layers.mechanism` for the call and `full_attention` for the mathematics."""

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

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        carry: Any = None,
        cache: Any = None,
        positions: Any = None,
        lengths: Any = None,
        segment_ids: Any = None,
        count: Any = None,
        deterministic: bool = True,
    ):
        d = self.dimensions
        check_call(self.mechanism, segment_ids)
        length = x.shape[1]
        start = 0 if cache is None else cache["index"]
        query, key, value = project_qkv(
            d, x, token_positions(length, start) if positions is None else positions
        )
        if cache is None:
            attend = functools.partial(
                self.attend,
                query,
                key,
                is_causal=d.is_causal,
                key_value_seq_lengths=None if d.is_causal else lengths,
                segment_ids=segment_ids,
                implementation=d.implementation,
            )
            sow_weights(self, attend, value)
            return merge_heads(d, attend(value)), carry, None
        # New tokens that don't exist are written nowhere: their slots lie past the end and are dropped.
        slots = start + jnp.arange(length, dtype=jnp.int32)
        if count is not None:
            slots = jnp.where(jnp.arange(length) < count, slots, cache["key"].shape[1])
        cache = {
            "key": cache["key"].at[:, slots].set(key, mode="drop"),
            "value": cache["value"].at[:, slots].set(value, mode="drop"),
            "index": start + (length if count is None else count),
        }
        attended = self.attend(
            query,
            cache["key"],
            cache["value"],
            is_causal=True,
            query_offset=start,
            implementation=d.implementation,
        )
        return merge_heads(d, attended), carry, cache
