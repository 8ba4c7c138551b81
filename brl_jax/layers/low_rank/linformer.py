"""Linformer attention as a layer: bidirectional, for sequences up to a length that its parameters fix."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.low_rank.linformer import linformer_attention
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import parameter, project_qkv
from brl_jax.layers.core.protocol import LayerCall, Mechanism, check_max_length


@dataclasses.dataclass(frozen=True)
class LinformerConfig(Mechanism):
    """Softmax attention on keys and values projected along the length (Linformer, arXiv:2006.04768, eq. 7).

    All heads of a layer share one projection of the keys and one of the values."""

    causal: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True

    num_projected: Count = 256
    """Number of rows to which keys and values are projected [k]."""
    max_length: Count = 4096
    """Length of the longest sequence; the projections have a column for each of its tokens."""


class LinformerAttention(AttentionLayer, config=LinformerConfig):
    mechanism: LinformerConfig

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        check_max_length(self.mechanism, x.shape[1])
        function = functools.partial(
            linformer_attention,
            key_projection=self._projection("key_projection"),
            value_projection=self._projection("value_projection"),
        )
        return Attention(function, *project_qkv(self.dimensions, x, call.positions))

    def _projection(self, name: str) -> Float[Array, "R L"]:
        d, mechanism = self.dimensions, self.mechanism
        shape = (mechanism.num_projected, mechanism.max_length)
        # A projected row sums over the tokens; this factor gives max_length of them the variance of one.
        init = nn.initializers.normal(mechanism.max_length**-0.5)
        return parameter(self, name, init, shape, ("projected", "position")).astype(d.dtype)
