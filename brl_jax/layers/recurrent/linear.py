"""Linear attention as a layer, with a decoding cache whose size does not depend on the length."""

from __future__ import annotations

import dataclasses
import functools

from jaxtyping import Array, Float

from brl_jax.attention.recurrent.linear import FeatureMap, LinearState, init_linear_state, linear_attention
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import project_unrotated, rotary_options
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class LinearConfig(RecurrentConfig):
    """Linear attention (Katharopoulos et al. 2020, arXiv:2006.16236), with or without its denominator."""

    normalize: bool = True
    """Whether to divide by the sum of the weights."""
    feature_map: FeatureMap = "elu+1"
    """Feature map [phi] of the queries and keys."""


class LinearAttention(RecurrentLayer, config=LinearConfig):
    """`linear_attention`. Rotary positions rotate the features, so that weights depend on distances only."""

    def init_state(self, batch: int, length: int) -> LinearState:
        d = self.dimensions
        return init_linear_state(
            batch, d.num_kv_heads, d.head_dim, d.head_dim, normalize=self.mechanism.normalize
        )

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        m = self.mechanism
        function = functools.partial(
            linear_attention,
            normalize=m.normalize,
            feature_map=m.feature_map,
            chunk_size=m.chunk_size,
            **rotary_options(self.dimensions, call.positions),
        )
        return Attention(function, *project_unrotated(self.dimensions, x))
