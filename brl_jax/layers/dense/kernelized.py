"""Kernelized attention as a layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.dense.kernelized import kernelized_attention
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import project_qkv
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class KernelizedConfig(Mechanism):
    """Attention with a Gaussian kernel and no denominator (Skyformer, arXiv:2111.00035, section 4.1), quadratic in the
    length; for encoders."""

    causal: ClassVar[bool] = False


class KernelizedAttention(AttentionLayer, config=KernelizedConfig):
    mechanism: KernelizedConfig

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d = self.dimensions
        # muP's factor on the queries would change their distances from the keys, so it is in the scale.
        scale = d.head_dim**-0.5 * d.head_score_factor
        function = functools.partial(kernelized_attention, scale=scale, query_seq_lengths=call.lengths)
        return Attention(function, *project_qkv(d, x, call.positions, root_scores=False))
