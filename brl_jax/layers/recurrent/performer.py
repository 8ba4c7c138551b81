"""Performer as a layer, with a decoding cache whose size does not depend on the length."""

from __future__ import annotations

import dataclasses
import functools

from jaxtyping import Array, Float

from brl_jax.attention.recurrent.performer import (
    PerformerState,
    default_features,
    init_performer_state,
    performer_attention,
    performer_projection,
)
from brl_jax.fields import Count, Seed
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import project_qkv, sampled
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class PerformerConfig(RecurrentConfig):
    """FAVOR+ (Choromanski et al. 2020, arXiv:2009.14794)."""

    num_features: Count | None = None
    """Random features for each head; None for head_dim ln(head_dim), rounded."""
    seed: Seed = 0
    """Seed of the random features, which all heads and layers share, in training and in generation. If the network is
    called with a key "projection" among its rngs, each layer draws other features from that key."""


class PerformerAttention(RecurrentLayer, config=PerformerConfig):
    """`performer_attention` on rotated queries and keys."""

    def init_state(self, batch: int, length: int) -> PerformerState:
        d = self.dimensions
        return init_performer_state(
            batch, d.num_kv_heads, d.head_dim, num_features=self.mechanism.num_features
        )

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        number = m.num_features or default_features(d.head_dim)
        draw = functools.partial(performer_projection, num_features=number, head_dim=d.head_dim)
        projection = sampled(self, draw, m.seed, "projection")
        function = functools.partial(performer_attention, projection=projection, chunk_size=m.chunk_size)
        return Attention(function, *project_qkv(d, x, call.positions))
