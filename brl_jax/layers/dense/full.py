"""Full softmax attention as a layer, with a preallocated key/value cache."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.dense.full import full_attention
from brl_jax.fields import Range
from brl_jax.layers.core.attention_layer import SoftmaxConfig, SoftmaxLayer
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

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        return full_attention(query, key, value, **options)

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, rate = self.dimensions, self.mechanism.dropout
        if not rate or call.deterministic or call.cache is not None:
            return super().mix(x, call)
        # The residuals of bfloat16 would be too coarse.
        query, key, value = (each.astype(jnp.float32) for each in self.heads(x, call.positions))
        options = {
            "is_causal": d.is_causal,
            "key_value_seq_lengths": None if d.is_causal else call.lengths,
            "segment_ids": call.segment_ids,
            "implementation": d.implementation,
            "return_residual": True,
            **self.attention_options(call),
        }
        shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1.0 - rate, shape)
        # The weights that are kept are those of a softmax over all keys.
        kept, of_kept = full_attention(query, key, value, mask=keep, **options)
        _, of_all = full_attention(query, key, value, **options)
        share = jnp.exp(of_kept - of_all)[..., None] / (1.0 - rate)
        return self.output(x, (kept * share).astype(d.dtype)), None
