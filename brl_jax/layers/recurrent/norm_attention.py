"""NormAttention as a layer, with a decoding cache whose size does not depend on the length."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.linear import FeatureMap, LinearState, init_linear_state, linear_attention
from brl_jax.attention.recurrent.norm_attention import Norm, norm_attention
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import parameter, project_unrotated, rotary_options
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class NormConfig(RecurrentConfig):
    """Linear attention with a norm over the merged heads instead of the denominator (TransNormer, arXiv:2210.10340,
    eq. 14)."""

    feature_map: FeatureMap = "elu+1"
    """Feature map [phi] of the queries and keys: "elu" (T1), "elu+1" (T2) or "relu"."""
    norm: Norm = "rms"
    """The norm over the merged heads."""


class NormAttention(RecurrentLayer, config=NormConfig):
    """`norm_attention`. Rotary positions rotate the features, as in the authors' code."""

    def init_state(self, batch: int, length: int) -> LinearState:
        d = self.dimensions
        return init_linear_state(batch, d.num_kv_heads, d.head_dim, normalize=False)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        scale = parameter(
            self, "norm_scale", nn.initializers.ones_init(), (d.num_heads, d.head_dim), ("heads", "head_dim")
        )
        options = {
            "feature_map": m.feature_map,
            "chunk_size": m.chunk_size,
            **rotary_options(d, call.positions),
        }
        return Attention(
            functools.partial(
                norm_attention, norm=m.norm, norm_scale=scale, epsilon=d.norm_epsilon, **options
            ),
            *project_unrotated(d, x),
            linear_part=functools.partial(linear_attention, normalize=False, **options),
        )
