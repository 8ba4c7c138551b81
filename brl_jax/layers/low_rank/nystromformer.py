"""Nystromformer attention as a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import check_at_least, require
from brl_jax.attention.low_rank.nystromformer import nystromformer_attention
from brl_jax.layers.core.modules import merge_heads, parameter, project_qkv, sow_weights
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism, MechanismLayer


@dataclasses.dataclass(frozen=True)
class NystromformerConfig(Mechanism):
    """Softmax attention through landmarks, the means of segments (Nystromformer, arXiv:2102.03902); for encoders."""

    causal: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True

    num_landmarks: int = 128
    """Segments of the sequence, whose means are the landmarks."""
    iterations: int = 6
    """Steps of the iteration that approximates the pseudo-inverse."""
    conv_size: int = 0
    """Width of the convolution of the values that is added to each head, an odd number (33 in the paper); 0 disables
    it."""

    def __post_init__(self):
        check_at_least(self, "num_landmarks", "iterations")
        check_at_least(self, "conv_size", least=0)
        require(
            self.conv_size == 0 or self.conv_size % 2 == 1,
            f"conv_size must be odd, or 0 for none, got {self.conv_size}",
        )

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return NystromformerAttention(self, dimensions, **kwargs)


class NystromformerAttention(MechanismLayer):
    """See `brl_jax.layers.core.protocol` for the call and `nystromformer_attention` for the mathematics."""

    mechanism: NystromformerConfig
    dimensions: Dimensions

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        m.check(d)
        query, key, value = project_qkv(d, x, call.positions)
        kernel = None
        if m.conv_size:
            init = nn.initializers.normal((3 * m.conv_size) ** -0.5)
            kernel = parameter(self, "value_kernel", init, (d.num_heads, m.conv_size), ("heads", None))
        attend = functools.partial(
            nystromformer_attention,
            query,
            key,
            num_landmarks=m.num_landmarks,
            iterations=m.iterations,
            value_kernel=kernel,
            key_value_seq_lengths=call.lengths,
            implementation=d.implementation,
        )
        sow_weights(self, attend, value)
        return merge_heads(d, attend(value)), None
