"""Linear attention as a layer, with a cache of one size however many tokens it has seen."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, get_args

import flax.linen as nn

from brl_jax.attention.core.checks import check_choice
from brl_jax.attention.recurrent.linear import FeatureMap, LinearState, init_linear_state, linear_attention
from brl_jax.layers.core.modules import merge_heads, project_qkv
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.layers.recurrent.state_layer import StateLayer, check_chunk_size


@dataclasses.dataclass(frozen=True)
class LinearConfig(Mechanism):
    """Linear attention (Katharopoulos et al. 2020), with or without its denominator."""

    normalize: bool = True
    """Divide by the sum of the weights."""
    feature_map: FeatureMap = "elu+1"
    """phi of the queries and keys."""
    chunk_size: int = 64
    """Tokens of a chunk; changes time and memory, not results."""

    def __post_init__(self):
        check_choice("feature_map", self.feature_map, get_args(FeatureMap))
        check_chunk_size(self.chunk_size)

    @property
    def linear_cost(self) -> bool:
        return True

    @property
    def packs(self) -> bool:
        return True

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return LinearAttention(self, dimensions, **kwargs)


class LinearAttention(StateLayer):
    """`linear_attention` on rotated queries and keys: the rotation comes before phi, which keeps weights positive."""

    def init_state(self, batch: int, length: int) -> LinearState:
        d = self.dimensions
        return init_linear_state(
            batch, d.num_kv_heads, d.head_dim, d.head_dim, normalize=self.mechanism.normalize
        )

    def run(self, x, positions, call):
        m = self.mechanism
        query, key, value = project_qkv(self.dimensions, x, positions, root_scores=False)
        function = functools.partial(
            linear_attention,
            query,
            key,
            normalize=m.normalize,
            feature_map=m.feature_map,
            chunk_size=m.chunk_size,
        )
        attended, state = self.attend(function, value, call)
        return merge_heads(self.dimensions, attended), state
