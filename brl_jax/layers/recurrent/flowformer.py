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
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import project_unrotated, rotary_options
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class FlowformerConfig(RecurrentConfig):
    """Linear attention with conserved flows (Flowformer, arXiv:2202.06258)."""

    packs: ClassVar[bool] = False


class FlowformerAttention(RecurrentLayer, config=FlowformerConfig):
    """`flowformer_attention`. Rotary positions rotate the features, as in linear attention."""

    def init_state(self, batch: int, length: int) -> FlowformerState:
        d = self.dimensions
        return init_flowformer_state(batch, d.num_kv_heads, d.head_dim, num_heads=d.num_heads)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        options = rotary_options(self.dimensions, call.positions)
        function = functools.partial(flowformer_attention, chunk_size=self.mechanism.chunk_size, **options)
        return Attention(function, *project_unrotated(self.dimensions, x))
