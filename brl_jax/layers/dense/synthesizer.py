"""Synthesizer attention as a layer: weights from positions or from single tokens, and a cache of all values."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.state import write_tokens
from brl_jax.attention.dense.synthesizer import synthesizer_attention
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import parameter, scale_scores, to_heads
from brl_jax.layers.core.protocol import LayerCall, Mechanism, check_max_length

Weights = Literal["random", "dense"]


@dataclasses.dataclass(frozen=True)
class SynthesizerConfig(Mechanism):
    """Attention whose weights do not come from products of queries and keys (Synthesizer, arXiv:2005.00743), quadratic
    in the length. Weights depend on where tokens are in the row, whatever their positions."""

    weights: Weights = "random"
    """"random": the product of two trained matrices over positions (the factorised random form). "dense": a network of
    each token, with one hidden layer as wide as the head."""
    rank: Count = 32
    """Columns of the two matrices of "random" [k]."""
    max_length: Count = 4096
    """Length of the longest sequence; the parameters have an entry for each of its positions."""


class SynthesizerCache(NamedTuple):
    """A decoding cache: the values of all tokens so far, each at its position, and the number of tokens. Heads come
    before tokens, so that no product with a new token's weights copies the values."""

    values: Float[Array, "B K S H"]
    length: Int[Array, ""]


class SynthesizerAttention(AttentionLayer, config=SynthesizerConfig):
    mechanism: SynthesizerConfig

    def init_cache(self, batch: int, length: int) -> SynthesizerCache:
        d = self.dimensions
        check_max_length(self.mechanism, length)
        values = jnp.zeros((batch, d.num_kv_heads, length, d.head_dim), d.dtype)
        return SynthesizerCache(values, jnp.zeros((), jnp.int32))

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        check_max_length(self.mechanism, x.shape[1])
        value = to_heads(self.dimensions, x, "value", "kv_heads")
        rows, columns, bias = self._factors(x, call.start)

        def attend(rows: Array, columns: Array, value: Array, **options: Any) -> Array:
            return synthesizer_attention(value, rows=rows, columns=columns, column_bias=bias, **options)

        return Attention(attend, rows, columns, value)

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, SynthesizerCache]:
        new = jnp.swapaxes(attention.value, 1, 2)
        values = write_tokens(call.cache.values, new, call.start, call.count)
        attended = attention._replace(value=jnp.swapaxes(values, 1, 2))(query_offset=call.start, **options)
        return attended, SynthesizerCache(values, call.start + call.num_new(new.shape[2]))

    def _factors(self, x: Float[Array, "B T D"], start: Any) -> tuple[Array, Array, Array | None]:
        """Returns rows, columns and the columns' bias."""
        d, m = self.dimensions, self.mechanism
        if m.weights == "random":
            # Products over `rank` entries then have variance 1, like softmax attention's scores.
            init = nn.initializers.normal(m.rank**-0.25)
            shape, axes = (m.max_length, d.num_heads, m.rank), ("position", "heads", "projected")
            rows, columns = (
                parameter(self, name, init, shape, axes).astype(d.dtype) for name in ("rows", "columns")
            )
            places = start + jnp.arange(x.shape[1], dtype=jnp.int32)
            return jnp.take(rows, places, axis=0, mode="clip"), columns, None
        heads = (d.num_heads, d.head_dim)
        hidden = jax.nn.relu(to_heads(d, x, "hidden", use_bias=True))
        init = nn.initializers.normal(d.head_dim**-0.5)
        shape = (m.max_length, *heads)
        columns = parameter(self, "columns", init, shape, ("position", "heads", "head_dim"))
        zeros = nn.initializers.zeros_init()
        bias = parameter(self, "column_bias", zeros, shape[:2], ("position", "heads"))
        return scale_scores(hidden, d.head_score_factor), columns.astype(d.dtype), bias.astype(d.dtype)
