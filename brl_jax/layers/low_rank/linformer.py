"""Linformer attention as a layer: bidirectional, for sequences up to a length that its parameters fix."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import check_at_least
from brl_jax.attention.low_rank.linformer import linformer_attention
from brl_jax.layers.core.modules import merge_heads, parameter, project_qkv, sow_weights
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class LinformerConfig(Mechanism):
    """Softmax attention on keys and values projected along the length (Linformer, arXiv:2006.04768, eq. 7).

    All heads of a layer share one projection of the keys and one of the values."""

    causal: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True

    num_projected: int = 256
    """Number of rows to which keys and values are projected [k]."""
    max_length: int = 4096
    """Length of the longest sequence; the projections have a column for each of its tokens."""

    def __post_init__(self):
        check_at_least(self, "num_projected", "max_length")

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return LinformerAttention(self, dimensions, **kwargs)


class LinformerAttention(MechanismLayer):
    """See `brl_jax.layers.core.protocol` for the call and `linformer_attention` for the mathematics."""

    mechanism: LinformerConfig
    dimensions: Dimensions

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, mechanism = self.dimensions, self.mechanism
        mechanism.check(d)
        length = x.shape[1]
        if length > mechanism.max_length:
            raise ValueError(
                f"max_length must be at least the sequence's length {length}, got {mechanism.max_length}: "
                "Linformer has a projection for each position"
            )
        query, key, value = project_qkv(d, x, call.positions)
        attend = functools.partial(
            linformer_attention,
            query,
            key,
            key_projection=self._projection("key_projection"),
            value_projection=self._projection("value_projection"),
            key_value_seq_lengths=call.lengths,
            implementation=d.implementation,
        )
        sow_weights(self, attend, value)
        return merge_heads(d, attend(value)), None

    def _projection(self, name: str) -> Float[Array, "R L"]:
        d, mechanism = self.dimensions, self.mechanism
        shape = (mechanism.num_projected, mechanism.max_length)
        # A projected row sums over the tokens; this factor gives max_length of them the variance of one.
        init = nn.initializers.normal(mechanism.max_length**-0.5)
        return parameter(self, name, init, shape, ("projected", "position")).astype(d.dtype)
