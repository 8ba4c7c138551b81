"""The Long-Short Transformer's attention as a layer; its cache has a window, a chunk, and projected chunks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.low_rank.long_short import (
    LongShortState,
    Norms,
    init_long_short_state,
    long_short_attention,
)
from brl_jax.fields import Count
from brl_jax.layers.core.modules import (
    dense,
    merge_heads,
    parameter,
    project_qkv,
    rotary_options,
    sow_weights,
)
from brl_jax.layers.core.protocol import LayerCall, Mechanism, MechanismLayer


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


class LongShortAttention(MechanismLayer, config=LongShortConfig):
    mechanism: LongShortConfig

    def init_cache(self, batch: int, length: int) -> LongShortState:
        d, m = self.dimensions, self.mechanism
        return init_long_short_state(
            batch, d.num_kv_heads, d.head_dim, length=length, rank=m.chunk_rank, window=m.window,
            chunk_size=m.chunk_size, dtype=d.dtype,
        )  # fmt: skip

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        d, m = self.dimensions, self.mechanism
        # The window's keys are rotated after their norm.
        query, key, value = project_qkv(d, x, None)
        rank = m.chunk_rank if d.is_causal else m.num_projected
        axes = ("embed", "kv_heads", "projected")
        projection = dense(d, (d.num_kv_heads, rank), axes, name="projection")(x)
        options: dict[str, Any] = {
            "norms": self._norms(),
            "epsilon": d.norm_epsilon,
            "window": m.window,
            "chunk_size": m.chunk_size,
            "is_causal": d.is_causal,
            "implementation": d.implementation,
            **rotary_options(d, call.positions),
        }

        def attend(value: Array, **further: Any) -> Any:
            return long_short_attention(query, key, value, projection, **options, **further)

        if call.cache is not None:
            out, state = attend(value, state=call.cache, return_state=True, count=call.count)
            return merge_heads(d, out), state
        options["key_value_seq_lengths"] = None if d.is_causal else call.lengths

        # With norms of the values, the outputs are not linear in the values.
        sow_weights(self, functools.partial(attend, normalize_values=False), value)
        return merge_heads(d, attend(value)), None

    def _norms(self) -> Norms:
        d = self.dimensions
        shape, axes = (d.num_kv_heads, d.head_dim), ("kv_heads", "head_dim")
        scales = (
            parameter(self, f"{name}_norm_scale", nn.initializers.ones_init(), shape, axes)
            for name in Norms._fields
        )
        return Norms(*scales)
