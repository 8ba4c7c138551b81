"""Skyformer attention as a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

from jaxtyping import Array

from brl_jax.attention.low_rank.skyformer import skyformer_attention, skyformer_samples
from brl_jax.fields import Count, NonNegative, Seed
from brl_jax.layers.core.attention_layer import AttentionLayer
from brl_jax.layers.core.modules import distance_scale, sampled
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class SkyformerConfig(Mechanism):
    """Kernelized attention through sampled queries and keys (Skyformer, arXiv:2111.00035); for encoders."""

    causal: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True

    num_samples: Count = 128
    """Number of queries and keys to sample, half of each."""
    iterations: Count = 6
    """Steps of the iteration that approximates the inverse."""
    ridge: NonNegative = 0.1
    """Added to the diagonal of the matrix that is inverted."""
    seed: Seed = 0
    """Seed of the samples. If the network is called with deterministic=False and has a key "sample" among its rngs, as
    in training, each layer draws its samples from that key instead."""


class SkyformerAttention(AttentionLayer, config=SkyformerConfig):
    mechanism: SkyformerConfig

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        query, scale = distance_scale(self.dimensions, query)
        return skyformer_attention(query, key, value, scale=scale, **options)

    def attention_options(self, call: LayerCall) -> dict[str, Any]:
        m = self.mechanism
        draw = functools.partial(skyformer_samples, num_samples=m.num_samples)
        samples = sampled(self, draw, m.seed, call.deterministic)
        return {"samples": samples, "iterations": m.iterations, "ridge": m.ridge}
