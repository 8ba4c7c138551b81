"""Kimi Delta Attention and Gated DeltaNet-2 as layers: delta rules on a state in which each row has its own decay."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.delta import gated_delta_rule_2, kimi_delta_rule
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import GatedNorm, dense, low_rank_heads, merge_heads, to_heads
from brl_jax.layers.recurrent.convolved_layer import Convolutions, ConvolvedLayer
from brl_jax.layers.recurrent.decay import step_decay
from brl_jax.layers.recurrent.gated_deltanet import unit
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig


@dataclasses.dataclass(frozen=True)
class KDAConfig(RecurrentConfig):
    """Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692)."""

    bidirectional: ClassVar[bool] = False
    any_head_dim: ClassVar[bool] = True

    conv_size: Count = 4
    """Width in tokens of the convolutions of queries, keys and values."""
    gate_rank: Count | None = None
    """Inner width of the low-rank maps to the decay and to the output gate; None for the width of a head."""
    # With chunks of 64, XLA's compiler for TPUs aborts when a mesh shards sequences.
    chunk_size: Count = 128
    """Tokens in a chunk; changes time and memory, not results."""


class KDA(ConvolvedLayer, config=KDAConfig):
    """`kimi_delta_rule` on convolved projections, followed by a gated norm of each head (section 4 of the paper).

    beta = sigmoid(x W_b) for each key head, and the log decay is -exp(rate) softplus(x W_1 W_2 + step_bias) for each
    feature of its keys. Queries and keys are normalised, and queries divided by sqrt(head_dim). The output gate is
    sigmoid(x W_3 W_4). It uses no rotary positions: the recurrence already depends on the order.
    """

    def convolved_attention(self, x: Float[Array, "B T D"], convolve: Convolutions) -> Attention:
        d = self.dimensions

        def project(name: str, axis: Any) -> Array:
            return convolve(to_heads(d, x, name, axis), axis, "head_dim", name=f"{name}_conv")

        query, key = unit(project("query", "heads")), unit(project("key", "kv_heads"))
        value = project("value", "kv_heads")
        rule = self.rule(x)
        steps = low_rank_heads(d, x, "step", "kv_heads", self.mechanism.gate_rank)
        function = functools.partial(
            rule,
            log_decay=step_decay(self, steps, ("kv_heads", "head_dim"))[0],
            normalize_keys=False,
            chunk_size=self.mechanism.chunk_size,
        )
        return Attention(function, query * jnp.asarray(d.head_dim**-0.5, query.dtype), key, value)

    def rule(self, x: Float[Array, "B T D"]) -> Callable[..., Any]:
        """Returns the attention function, with the gates that the tokens give it."""
        d = self.dimensions
        beta = jax.nn.sigmoid(dense(d, d.num_kv_heads, ("embed", "kv_heads"), name="beta")(x))
        return functools.partial(kimi_delta_rule, beta=beta)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        d = self.dimensions
        gate = low_rank_heads(d, x, "gate", "heads", self.mechanism.gate_rank, use_bias=True)
        return merge_heads(d, GatedNorm(d, "sigmoid", name="head_norm")(attended, gate))


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet2Config(KDAConfig):
    """Gated DeltaNet-2 (Hatamizadeh et al. 2026, arXiv:2605.22791)."""


class GatedDeltaNet2(KDA, config=GatedDeltaNet2Config):
    """`KDA` with `gated_delta_rule_2`: beta gives way to erase = sigmoid(x W_b) for each feature of the keys and
    write = sigmoid(x W_w) for each feature of the values."""

    def rule(self, x: Float[Array, "B T D"]) -> Callable[..., Any]:
        d = self.dimensions

        erase, write = (jax.nn.sigmoid(to_heads(d, x, name, "kv_heads")) for name in ("erase", "write"))
        return functools.partial(gated_delta_rule_2, erase=erase, write=write)
