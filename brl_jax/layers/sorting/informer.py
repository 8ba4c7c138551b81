"""Informer's ProbSparse attention as a layer; its cache has the keys and values of all tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.sorting.informer import (
    InformerState,
    informer_attention,
    init_informer_state,
)
from brl_jax.fields import Count, Seed
from brl_jax.layers.core.attention_layer import Attention, StateLayer
from brl_jax.layers.core.modules import project_qkv, sampled
from brl_jax.layers.core.protocol import LayerCall, Mechanism


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


class InformerAttention(StateLayer, config=InformerConfig):
    mechanism: InformerConfig

    def init_cache(self, batch: int, length: int) -> InformerState:
        d = self.dimensions
        return init_informer_state(
            batch, d.num_kv_heads, d.head_dim, length=length, num_heads=d.num_heads, factor=self.mechanism.factor,
            dtype=d.dtype,
        )  # fmt: skip

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        rng = sampled(self, lambda key: key, self.mechanism.seed, None if call.deterministic else "sample")
        function = functools.partial(informer_attention, rng=rng, factor=self.mechanism.factor)
        return Attention(function, *project_qkv(self.dimensions, x, call.positions))
