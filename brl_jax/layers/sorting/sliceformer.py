"""Sliceformer's slicing and sorting as a layer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.sorting.sliceformer import Order, sliceformer_attention
from brl_jax.layers.core.modules import merge_heads, to_heads
from brl_jax.layers.core.protocol import LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class SliceformerConfig(Mechanism):
    """Sorts every channel of the values along the sequence (Sliceformer, arXiv:2310.17683); for encoders.

    The cost is linear up to a factor of the logarithm of the length. It has neither queries nor keys, so rotary
    positions and the number of key/value heads have no effect."""

    causal: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True

    order: Order = "ascending"
    """"ascending", "descending", "interleaved" (neighbouring channels in opposite orders) or "max_exchange" (swaps the
    first token's value with the largest one)."""


class SliceformerAttention(MechanismLayer, config=SliceformerConfig):
    """It sows no "weights": every channel has its own permutation, so heads have no matrix."""

    mechanism: SliceformerConfig

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        value = to_heads(d, x, "value")
        out = sliceformer_attention(
            value, order=m.order, key_value_seq_lengths=call.lengths, implementation=d.implementation
        )
        return merge_heads(d, out), None
