"""Flow attention as a layer, with a decoding cache whose size does not depend on the length."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.recurrent.flowformer import (
    FlowformerState,
    flowformer_attention,
    init_flowformer_state,
)
from brl_jax.layers.core.modules import project_unrotated, rotary_options
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.state_layer import StateAttention, StateConfig, StateLayer


@dataclasses.dataclass(frozen=True)
class FlowformerConfig(StateConfig):
    """Linear attention with conserved flows (Flowformer, arXiv:2202.06258)."""

    packs: ClassVar[bool] = False


class FlowformerAttention(StateLayer, config=FlowformerConfig):
    """`flowformer_attention`. Rotary positions rotate the features, as in linear attention."""

    def init_state(self, batch: int, length: int) -> FlowformerState:
        d = self.dimensions
        return init_flowformer_state(batch, d.num_kv_heads, d.head_dim, num_heads=d.num_heads)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> StateAttention:
        query, key, value = project_unrotated(self.dimensions, x)
        options = rotary_options(self.dimensions, call.positions)
        function = functools.partial(
            flowformer_attention, query, key, chunk_size=self.mechanism.chunk_size, **options
        )
        return StateAttention(function, value)
