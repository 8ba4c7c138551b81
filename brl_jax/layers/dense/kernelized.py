"""Kernelized attention as a layer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array

from brl_jax.attention.dense.kernelized import kernelized_attention
from brl_jax.layers.core.attention_layer import AttentionLayer
from brl_jax.layers.core.modules import distance_scale
from brl_jax.layers.core.protocol import Mechanism


@dataclasses.dataclass(frozen=True)
class KernelizedConfig(Mechanism):
    """Attention with a Gaussian kernel and no denominator (Skyformer, arXiv:2111.00035, section 4.1), quadratic in the
    length; for encoders."""

    causal: ClassVar[bool] = False


class KernelizedAttention(AttentionLayer, config=KernelizedConfig):
    mechanism: KernelizedConfig

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        query, scale = distance_scale(self.dimensions, query)
        lengths = options["key_value_seq_lengths"]
        return kernelized_attention(query, key, value, scale=scale, query_seq_lengths=lengths, **options)
