"""Skyformer attention as a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.low_rank.skyformer import skyformer_attention, skyformer_samples
from brl_jax.fields import Count, NonNegative, Seed
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import project_qkv, sampled
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

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        draw = functools.partial(skyformer_samples, num_samples=m.num_samples)
        function = functools.partial(
            skyformer_attention,
            samples=sampled(self, draw, m.seed, None if call.deterministic else "sample"),
            iterations=m.iterations,
            ridge=m.ridge,
            # muP's factor on the queries would change their distances from the keys, so it is in the scale.
            scale=d.head_dim**-0.5 * d.head_score_factor,
        )
        return Attention(function, *project_qkv(d, x, call.positions, root_scores=False))
