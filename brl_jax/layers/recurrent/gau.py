"""Gated attention units: attention and feed-forward network in one layer (Hua et al. 2022, arXiv:2202.10447)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from brl_jax.attention.core.biases import RotaryBias
from brl_jax.attention.recurrent.gau import gau_attention, init_gau_state
from brl_jax.attention.recurrent.mixed_chunk import (
    MixedChunkState,
    init_mixed_chunk_state,
    mixed_chunk_attention,
)
from brl_jax.fields import Count, Even
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import dense, parameter, rotated
from brl_jax.layers.core.protocol import LayerCall, Mechanism, Residual
from brl_jax.layers.recurrent.recurrent_layer import RecurrentLayer


@dataclasses.dataclass(frozen=True)
class GAUConfig(Mechanism):
    """Gated attention unit with quadratic attention (Hua et al. 2022, section 3.1).

    It has one head and replaces both the attention and the feed-forward network of a block, so num_heads and d_ff have
    no effect.
    """

    packs: ClassVar[bool] = True
    residual: ClassVar[Residual] = "mixer"

    expansion: Count = 2
    """Width of values and gates, as a multiple of the model's width."""
    key_dim: Even = 128
    """Features of queries and keys."""
    chunk_size: Count = 128
    """Queries processed at a time; changes time and memory, not results."""


@dataclasses.dataclass(frozen=True)
class FlashConfig(GAUConfig):
    """FLASH: gated attention unit with quadratic attention inside chunks and linear attention between them (Hua et al.
    2022, section 3.2)."""

    linear_cost: ClassVar[bool] = True
    # Chunks would cut a packed sequence elsewhere than the same sequence alone.
    packs: ClassVar[bool] = False

    chunk_size: Count = 256
    """Tokens in a chunk; changes results."""


class GAUAttention(RecurrentLayer, config=GAUConfig):
    """out = (U * attention(Z, Z, V)) W, with U, V = silu(x W_u), silu(x W_v) and Z = silu(x W_z).

    Queries and keys are affine maps of Z, channel by channel, then rotated; the bias is a `RotaryBias` with the same
    base (10,000 in a network without rotary positions). The initial values give useful attention from the start: the
    bias is 1/2 between a token and itself and decreases with distance, and the factors of Z are 1 / sqrt(key_dim).
    Drawn from N(0, 0.02^2), as in the authors' code, they would start all attention weights below 1e-4, because the
    squared ReLU squares small scores.
    """

    def init_state(self, batch: int, length: int) -> Any:
        m, d = self.mechanism, self.dimensions
        return init_gau_state(batch, 1, m.key_dim, m.expansion * d.d_model, length=length, dtype=d.dtype)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        return self.around(gau_attention, x, *self.affine_maps(x, call.positions, 2))

    def affine_maps(self, x: Float[Array, "B T D"], positions: Any, count: int) -> list[Array]:
        """Returns `count` maps of Z, each (B, T, 1, key_dim)."""
        d, size = self.dimensions, self.mechanism.key_dim
        z = jax.nn.silu(dense(d, size, ("embed", "head_dim"), name="shared")(x))
        small, zeros = nn.initializers.constant(size**-0.5), nn.initializers.zeros_init()
        scale = parameter(self, "scale", small, (count, size), (None, "head_dim")).astype(d.dtype)
        offset = parameter(self, "offset", zeros, (count, size), (None, "head_dim")).astype(d.dtype)
        maps = [(z * scale[i][None, None] + offset[i][None, None])[:, :, None] for i in range(count)]
        return [rotated(d, each, positions) for each in maps]

    def around(self, function: Any, x: Float[Array, "B T D"], query: Array, key: Array) -> Attention:
        """Returns `function` of the queries and keys, with this layer's bias and values."""
        m, d = self.mechanism, self.dimensions
        value = self.widened(x, "value")[:, :, None]
        half = nn.initializers.constant((2 * m.key_dim) ** -0.5)
        left, right = (
            parameter(self, f"bias_{side}", half, (1, m.key_dim), (None, "head_dim"))
            for side in ("left", "right")
        )
        bias = RotaryBias(left, right) if d.rope_theta is None else RotaryBias(left, right, d.rope_theta)
        return Attention(functools.partial(function, bias=bias, chunk_size=m.chunk_size), query, key, value)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T 1 V"]) -> Float[Array, "B T D"]:
        d = self.dimensions
        out = dense(d, d.d_model, ("mlp", "embed"), name="out", scale=d.residual_scale)
        return out(self.widened(x, "gate") * attended[:, :, 0])

    def widened(self, x: Float[Array, "B T D"], name: str) -> Float[Array, "B T V"]:
        """Returns U or V of the formula above."""
        d = self.dimensions
        return jax.nn.silu(dense(d, self.mechanism.expansion * d.d_model, ("embed", "mlp"), name=name)(x))


class MixedChunkAttention(GAUAttention, config=FlashConfig):
    """`GAUAttention` with `mixed_chunk_attention`; queries and keys of both parts are maps of the same Z."""

    def init_state(self, batch: int, length: int) -> MixedChunkState:
        m, d = self.mechanism, self.dimensions
        return init_mixed_chunk_state(
            batch, 1, m.key_dim, m.expansion * d.d_model, chunk_size=m.chunk_size, dtype=d.dtype
        )

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        query, key, linear_query, linear_key = self.affine_maps(x, call.positions, 4)

        def attend(query: Array, key: Array, value: Array, **options: Any) -> Any:
            return mixed_chunk_attention(query, key, linear_query, linear_key, value, **options)

        return self.around(attend, x, query, key)
