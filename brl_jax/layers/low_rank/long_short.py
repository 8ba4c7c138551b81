"""The Long-Short Transformer's attention as a layer; its cache has a window, a chunk, and projected chunks."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.low_rank.long_short import (
    LongShortState,
    Norms,
    init_long_short_state,
    long_short_attention,
)
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, StateLayer
from brl_jax.layers.core.modules import dense, parameter, project_qkv, rotary_options
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class LongShortConfig(Mechanism):
    """One softmax over a window and over projected tokens (Long-Short Transformer, arXiv:2107.02192).

    The cost is linear in an encoder. A decoder projects every chunk, so its time grows with
    length^2 chunk_rank / chunk_size."""

    window: Count = 128
    """Width w: in an encoder a token sees its block of w tokens and w // 2 tokens on each side of it; in a decoder it
    sees itself and the w - 1 tokens before it."""
    num_projected: Count = 128
    """Number of tokens to which an encoder projects the sequence [r]."""
    chunk_size: Count = 16
    """Tokens in a chunk, which a decoder projects separately."""
    chunk_rank: Count = 1
    """Number of tokens to which a decoder projects each chunk."""


class LongShortAttention(StateLayer, config=LongShortConfig):
    mechanism: LongShortConfig

    def init_cache(self, batch: int, length: int) -> LongShortState:
        d, m = self.dimensions, self.mechanism
        return init_long_short_state(
            batch, d.num_kv_heads, d.head_dim, length=length, chunk_rank=m.chunk_rank, window=m.window,
            chunk_size=m.chunk_size, dtype=d.dtype,
        )  # fmt: skip

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        # The window's keys are rotated after their norm.
        query, key, value = project_qkv(d, x, None)
        rank = m.chunk_rank if d.is_causal else m.num_projected
        axes = ("embed", "kv_heads", "projected")
        projection = dense(d, (d.num_kv_heads, rank), axes, name="projection")(x)
        function = functools.partial(
            long_short_attention,
            projection=projection,
            norms=self._norms(),
            epsilon=d.norm_epsilon,
            window=m.window,
            chunk_size=m.chunk_size,
            **rotary_options(d, call.positions),
        )
        # With norms of the values, the outputs are not linear in the values.
        return Attention(function, query, key, value, functools.partial(function, normalize_values=False))

    def _norms(self) -> Norms:
        d = self.dimensions
        shape, axes = (d.num_kv_heads, d.head_dim), ("kv_heads", "head_dim")
        scales = (
            parameter(self, f"{name}_norm_scale", nn.initializers.ones_init(), shape, axes)
            for name in Norms._fields
        )
        return Norms(*scales)
