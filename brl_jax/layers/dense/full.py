"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.softmax import MASKED
from brl_jax.attention.dense.full import full_attention
from brl_jax.fields import Range
from brl_jax.layers.core.attention_layer import Attention, SoftmaxConfig, SoftmaxLayer
from brl_jax.layers.core.protocol import LayerCall


@dataclasses.dataclass(frozen=True)
class FullConfig(SoftmaxConfig):
    """Softmax attention over all tokens, in a decoder over the earlier ones (Vaswani et al. 2017, arXiv:1706.03762);
    quadratic in the length."""

    packs: ClassVar[bool] = True

    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Share of the attention weights that training drops (RoBERTa has 0.1). It takes a random number for each pair of
    tokens, and attention is computed twice."""


class FullAttention(SoftmaxLayer, config=FullConfig):
    mechanism: FullConfig

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        attention, rate = self.softmax(full_attention, x, call), self.mechanism.dropout
        if not rate or call.deterministic or call.cache is not None:
            return attention
        (batch, length, heads, _), keys = attention.query.shape, attention.key.shape[1]
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1.0 - rate, (batch, heads, length, keys))

        def dropped(query: Array, key: Array, value: Array, **options: Any) -> Array:
            # The residuals of bfloat16 would be too coarse.
            arrays = [array.astype(jnp.float32) for array in (query, key, value)]
            # Dropout comes after the softmax, which divides by the sum over all keys.
            kept, of_kept = attention.function(*arrays, mask=keep, return_residual=True, **options)
            _, of_all = attention.function(*arrays, return_residual=True, **options)
            # A row without keys has -inf in both, whose difference is NaN.
            share = jnp.exp(of_kept - jnp.maximum(of_all, MASKED))[..., None] / (1.0 - rate)
            return (kept * share).astype(value.dtype)

        return attention._replace(function=dropped)
