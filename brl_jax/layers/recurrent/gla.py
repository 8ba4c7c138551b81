"""Gated linear attention as a layer: each feature of the keys has its own decay in the state."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.linear import LinearState, init_linear_state, linear_attention
from brl_jax.fields import Count, Positive
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import dense, gated_output, to_heads
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class GLAConfig(RecurrentConfig):
    """Gated linear attention (Yang et al. 2023, arXiv:2312.06635)."""

    bidirectional: ClassVar[bool] = False

    key_dim: Count | None = None
    """Features of a head's queries and keys; None for half the head dimension."""
    gate_rank: Count = 16
    """Rank of the map from tokens to decays."""
    temperature: Positive = 16.0
    """Decays are the tau-th root of a sigmoid [tau]; larger values decay more slowly."""


class GLA(RecurrentLayer, config=GLAConfig):
    """out = (swish(X W_r) * norm(attention(X))) W_O, with a norm of each head (section 4.4).

    The decays are sigmoid(x W_1 W_2 + b)^(1/tau) with W_1 of low rank. It uses no rotary positions, because decay and
    recurrence already depend on the order of the tokens.
    """

    @property
    def key_dim(self) -> int:
        """Features of a head's queries and keys."""
        m = self.mechanism
        return max(1, self.dimensions.head_dim // 2) if m.key_dim is None else m.key_dim

    def init_state(self, batch: int, length: int) -> LinearState:
        d = self.dimensions
        return init_linear_state(batch, d.num_kv_heads, self.key_dim, d.head_dim, normalize=False)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        query = to_heads(d, x, "query", size=self.key_dim)
        key = to_heads(d, x, "key", "kv_heads", size=self.key_dim)
        value = to_heads(d, x, "value", "kv_heads")
        narrow = dense(d, m.gate_rank, ("embed", "projected"), name="decay_down")(x)
        axes = ("projected", "kv_heads", "head_dim")
        logits = dense(d, (d.num_kv_heads, self.key_dim), axes, name="decay_up", use_bias=True)(narrow)
        function = functools.partial(
            linear_attention,
            log_decay=jax.nn.log_sigmoid(logits.astype(jnp.float32)) / m.temperature,
            is_causal=True,
            normalize=False,
            feature_map="identity",
            chunk_size=m.chunk_size,
        )
        return Attention(function, query * jnp.asarray(self.key_dim**-0.5, query.dtype), key, value)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return gated_output(self.dimensions, x, attended)
