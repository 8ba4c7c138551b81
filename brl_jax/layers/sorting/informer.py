"""Informer's ProbSparse attention as a layer; its cache has the keys and values of all tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.sorting.informer import (
    InformerState,
    informer_attention,
    init_informer_state,
)
from brl_jax.fields import Count, Seed
from brl_jax.layers.core.modules import merge_heads, project_qkv, sampled, sow_weights
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class InformerConfig(Mechanism):
    """Softmax attention for the few queries that differ most from uniform attention (Informer, arXiv:2012.07436).

    The cost is linear up to factors of the logarithm of the length."""

    linear_cost: ClassVar[bool] = True

    factor: Count = 5
    """Each query samples this number times ceil(ln length) keys, and the same number of queries attend."""
    seed: Seed = 0
    """Seed of the samples. If the network is called with deterministic=False and has a key "sample" among its rngs, as
    in training, each layer draws its samples from that key instead."""

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return InformerAttention(self, dimensions, **kwargs)


class InformerAttention(MechanismLayer):
    """See `brl_jax.layers.core.protocol` for the call and `informer_attention` for the mathematics."""

    mechanism: InformerConfig
    dimensions: Dimensions

    def init_cache(self, batch: int, length: int) -> InformerState:
        d = self.dimensions
        return init_informer_state(
            batch, d.num_kv_heads, d.head_dim, length=length, num_heads=d.num_heads, factor=self.mechanism.factor,
            dtype=d.dtype,
        )  # fmt: skip

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        query, key, value = project_qkv(d, x, call.positions)
        rng = sampled(self, lambda key: key, m.seed, call.deterministic)
        options: dict[str, Any] = {
            "factor": m.factor,
            "is_causal": d.is_causal,
            "implementation": d.implementation,
        }
        if call.cache is not None:
            out, state = informer_attention(
                query, key, value, rng=rng, state=call.cache, return_state=True, count=call.count, **options
            )
            return merge_heads(d, out), state

        def attend(value: Array) -> Any:
            lengths = None if d.is_causal else call.lengths
            return informer_attention(query, key, value, rng=rng, key_value_seq_lengths=lengths, **options)

        sow_weights(self, attend, value)
        return merge_heads(d, attend(value)), None
