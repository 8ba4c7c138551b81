"""cosFormer as a layer, with a decoding cache whose size does not depend on the length."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_at_least
from brl_jax.attention.recurrent.cosformer import CosformerState, cosformer_attention, init_cosformer_state
from brl_jax.layers.core.modules import project_unrotated
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.layers.recurrent.state_layer import StateAttention, StateLayer


@dataclasses.dataclass(frozen=True)
class CosformerConfig(Mechanism):
    """cosFormer (Qin et al. 2022, arXiv:2202.08791)."""

    linear_cost: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    max_length: int = 2048
    """Length of the longest sequence, which is the distance at which a weight reaches 0."""
    chunk_size: int = 64
    """Tokens of a chunk; changes time and memory, not results."""

    def __post_init__(self):
        check_at_least(self, "max_length", "chunk_size")

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return CosformerAttention(self, dimensions, **kwargs)


class CosformerAttention(StateLayer):
    """`cosformer_attention`. Its weights depend on the tokens' distance, so there are no rotary positions."""

    def init_state(self, batch: int, length: int) -> CosformerState:
        d = self.dimensions
        if length > self.mechanism.max_length:
            raise ValueError(
                f"max_length={self.mechanism.max_length} of the cosformer mechanism must be at least the cache's "
                f"length {length}"
            )
        return init_cosformer_state(batch, d.num_kv_heads, d.head_dim, d.head_dim)

    def attention(self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]) -> StateAttention:
        m = self.mechanism
        query, key, value = project_unrotated(self.dimensions, x)
        function = functools.partial(
            cosformer_attention, query, key, max_length=m.max_length, chunk_size=m.chunk_size
        )
        return StateAttention(function, value)
