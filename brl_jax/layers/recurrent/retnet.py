"""RetNet's retention as a layer: linear attention whose state decays by a fixed factor in each head."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.linear import LinearState, init_linear_state, linear_attention
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import gated_output, rotary_options, to_heads
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class RetNetConfig(RecurrentConfig):
    """Multi-scale retention (Sun et al. 2023, arXiv:2307.08621)."""

    bidirectional: ClassVar[bool] = False

    expansion: Count = 2
    """Width of values and gates, as a multiple of the model's width."""


class RetNet(RecurrentLayer, config=RetNetConfig):
    """out = (swish(X W_G) * norm(retention(X))) W_O (eq. 8), with a norm of each head.

    The state of key head h decays by 1 - 2^(-5 - h) from token to token, and queries and keys are rotated by their
    positions (eq. 5). Keys are divided by the square root of their size, as in the authors' code.
    """

    def init_state(self, batch: int, length: int) -> LinearState:
        d = self.dimensions
        value_dim = self.mechanism.expansion * d.head_dim
        return init_linear_state(batch, d.num_kv_heads, d.head_dim, value_dim, normalize=False)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        query, key = to_heads(d, x, "query"), to_heads(d, x, "key", "kv_heads")
        value = to_heads(d, x, "value", "kv_heads", size=m.expansion * d.head_dim)
        function = functools.partial(
            linear_attention,
            log_decay=jnp.asarray(np.log1p(-(2.0 ** (-5.0 - np.arange(d.num_kv_heads)))), jnp.float32),
            is_causal=True,
            normalize=False,
            feature_map="identity",
            chunk_size=m.chunk_size,
            **rotary_options(d, call.positions),
        )
        return Attention(function, query, key * jnp.asarray(d.head_dim**-0.5, key.dtype), value)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        return gated_output(self.dimensions, x, attended)
