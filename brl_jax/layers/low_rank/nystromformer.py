"""Nystromformer attention as a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import require
from brl_jax.attention.low_rank.nystromformer import nystromformer_attention
from brl_jax.fields import Count, Natural
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import parameter, project_qkv
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class NystromformerConfig(Mechanism):
    """Softmax attention through landmarks, the means of segments (Nystromformer, arXiv:2102.03902); for encoders."""

    causal: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True

    num_landmarks: Count = 128
    """Segments of the sequence, whose means are the landmarks."""
    iterations: Count = 6
    """Steps of the iteration that approximates the pseudo-inverse."""
    conv_size: Natural = 0
    """Width of the convolution of the values that is added to each head, an odd number (33 in the paper); 0 disables
    it."""

    def __post_init__(self):
        require(
            self.conv_size == 0 or self.conv_size % 2 == 1,
            f"conv_size must be odd, or 0 for none, got {self.conv_size}",
        )


class NystromformerAttention(AttentionLayer, config=NystromformerConfig):
    mechanism: NystromformerConfig

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        kernel = None
        if m.conv_size:
            init = nn.initializers.normal((3 * m.conv_size) ** -0.5)
            kernel = parameter(self, "value_kernel", init, (d.num_heads, m.conv_size), ("heads", None))
        function = functools.partial(
            nystromformer_attention,
            num_landmarks=m.num_landmarks,
            iterations=m.iterations,
            value_kernel=kernel,
        )
        return Attention(function, *project_qkv(d, x, call.positions))
