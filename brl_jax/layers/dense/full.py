"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array

from brl_jax.attention.core.arguments import check_soft_cap
from brl_jax.attention.dense.full import full_attention
from brl_jax.layers.core.attention_layer import SoftmaxLayer
from brl_jax.layers.core.protocol import Dimensions, Mechanism


@dataclasses.dataclass(frozen=True)
class FullConfig(Mechanism):
    """Softmax attention over all tokens (in a decoder, over the earlier ones), quadratic in the length."""

    packs: ClassVar[bool] = True

    sinks: bool = False
    """A learned logit without a value for each head, in the softmax beside the keys (gpt-oss, arXiv:2508.10925)."""
    logits_soft_cap: float | None = None
    """Bounds the scaled scores smoothly (Gemma 2, arXiv:2408.00118); None for no bound."""

    def __post_init__(self):
        check_soft_cap(self.logits_soft_cap)

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return FullAttention(self, dimensions, **kwargs)


class FullAttention(SoftmaxLayer):
    """See `brl_jax.layers.core.protocol` for the call and `full_attention` for the mathematics."""

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        return full_attention(query, key, value, **options)
