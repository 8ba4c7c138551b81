"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from brl_jax.attention.dense.full import full_attention
from brl_jax.layers.core.caches import KeyValueCache
from brl_jax.layers.core.modules import merge_heads, project_qkv, sow_weights
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class FullConfig(Mechanism):
    """Softmax attention over all tokens (in a decoder, over the earlier ones), quadratic in the length."""

    packs: ClassVar[bool] = True

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return FullAttention(self, dimensions, **kwargs)


class FullAttention(MechanismLayer):
    """See `brl_jax.layers.core.protocol` for the call and `full_attention` for the mathematics."""

    mechanism: Mechanism
    dimensions: Dimensions

    def attend(self, query: jax.Array, key: jax.Array, value: jax.Array, **kwargs: Any) -> jax.Array:
        """The attention function, which is all that some other mechanisms replace."""
        return full_attention(query, key, value, **kwargs)

    def init_cache(self, batch: int, length: int) -> KeyValueCache:
        """Room for the keys and values of `length` tokens."""
        d = self.dimensions
        shape = (batch, length, d.num_kv_heads, d.head_dim)
        return KeyValueCache.empty(shape, shape, d.dtype)

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d = self.dimensions
        query, key, value = project_qkv(d, x, call.positions)
        if call.cache is None:
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
        cache = call.cache.append(key, value, call.count)
        attended = self.attend(
            query,
            cache.key,
            cache.value,
            is_causal=True,
            query_offset=call.start,
            implementation=d.implementation,
        )
        return merge_heads(d, attended), cache
