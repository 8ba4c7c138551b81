"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
from jaxtyping import Array

from brl_jax.attention.dense.on_mesh import dense_on_mesh
from brl_jax.layers.core.attention_layer import SoftmaxConfig, SoftmaxLayer
from brl_jax.layers.core.protocol import Dimensions


@dataclasses.dataclass(frozen=True)
class FullConfig(SoftmaxConfig):
    """Softmax attention over all tokens, in a decoder over the earlier ones (Vaswani et al. 2017, arXiv:1706.03762);
    quadratic in the length."""

    packs: ClassVar[bool] = True

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return FullAttention(self, dimensions, **kwargs)


class FullAttention(SoftmaxLayer):
    """See `brl_jax.layers.core.protocol` for the call and `full_attention` for the mathematics."""

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        return dense_on_mesh(query, key, value, **options)
