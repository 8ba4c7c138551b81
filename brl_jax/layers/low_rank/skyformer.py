"""Skyformer attention as a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.low_rank.skyformer import skyformer_attention, skyformer_samples
from brl_jax.fields import Count, NonNegative, Seed
from brl_jax.layers.core.modules import (
    distance_scale,
    merge_heads,
    project_qkv,
    sampled,
    sow_weights,
)
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer


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

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return SkyformerAttention(self, dimensions, **kwargs)


class SkyformerAttention(MechanismLayer):
    """See `brl_jax.layers.core.protocol` for the call and `skyformer_attention` for the mathematics."""

    mechanism: SkyformerConfig
    dimensions: Dimensions

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        m.check(d)
        query, key, value = project_qkv(d, x, call.positions)
        query, scale = distance_scale(d, query)
        draw = functools.partial(skyformer_samples, num_samples=m.num_samples)
        attend = functools.partial(
            skyformer_attention,
            query,
            key,
            samples=sampled(self, draw, m.seed, call.deterministic),
            iterations=m.iterations,
            ridge=m.ridge,
            scale=scale,
            key_value_seq_lengths=call.lengths,
            implementation=d.implementation,
        )
        sow_weights(self, attend, value)
        return merge_heads(d, attend(value)), None
