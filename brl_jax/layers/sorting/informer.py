"""Informer's ProbSparse attention as a layer; its cache has the keys and values of all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_at_least
from brl_jax.attention.core.whole_rows import by_heads
from brl_jax.attention.sorting.informer import (
    InformerState,
    informer_attention,
    informer_step,
    init_informer_state,
)
from brl_jax.layers.core.caches import KeyValueCache
from brl_jax.layers.core.modules import merge_heads, project_qkv, sampled, sow_weights
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class InformerConfig(Mechanism):
    """Softmax attention for the few queries that differ most from uniform attention (Informer, arXiv:2012.07436).

    The cost is linear up to factors of the logarithm of the length."""

    linear_cost: ClassVar[bool] = True

    factor: int = 5
    """Each query samples this number times ceil(ln length) keys, and the same number of queries attend."""
    seed: int = 0
    """Seed of the samples. If the network is called with deterministic=False and has a key "sample" among its rngs, as
    in training, each layer draws its samples from that key instead."""

    def __post_init__(self):
        check_at_least(self, "factor")

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return InformerAttention(self, dimensions, **kwargs)


class InformerCache(NamedTuple):
    """A decoding cache.

    Attributes:
      past: the keys and values of all tokens so far.
      value_sum: the sum of the values, in float32.
      state: see `InformerState`.
    """

    past: KeyValueCache
    value_sum: Float[Array, "B K H"]
    state: InformerState

    @property
    def num_tokens(self) -> Int[Array, ""]:
        return self.past.num_tokens


class InformerAttention(MechanismLayer):
    """See `brl_jax.layers.core.protocol` for the call and `informer_attention` for the mathematics."""

    mechanism: InformerConfig
    dimensions: Dimensions

    def init_cache(self, batch: int, length: int) -> InformerCache:
        d = self.dimensions
        shape = (batch, length, d.num_kv_heads, d.head_dim)
        value_sum = jnp.zeros((batch, d.num_kv_heads, d.head_dim), jnp.float32)
        state = init_informer_state(batch, length, d.num_heads, self.mechanism.factor)
        return InformerCache(KeyValueCache.empty(shape, shape, d.dtype), value_sum, state)

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        query, key, value = project_qkv(d, x, call.positions)
        rng = sampled(self, lambda key: key, m.seed, call.deterministic)
        if call.cache is not None:
            past = call.cache.past.append(key, value, call.count)
            out, value_sum, state = informer_step(
                query, past.key, past.value, call.cache.value_sum, call.cache.state, start=call.start,
                count=call.count, rng=rng, factor=m.factor,
            )  # fmt: skip
            return merge_heads(d, out), InformerCache(past, value_sum, state)

        def attend(value: Array) -> Array:
            def of_rows(query: Array, key: Array, value: Array, lengths: Any, rng: Any) -> Array:
                return informer_attention(
                    query, key, value, rng=rng, factor=m.factor, is_causal=d.is_causal,
                    key_value_seq_lengths=lengths, implementation=d.implementation,
                )  # fmt: skip

            return by_heads(of_rows, (query, key, value), (None if d.is_causal else call.lengths,), (rng,))

        sow_weights(self, attend, value)
        return merge_heads(d, attend(value)), None
