"""DeltaNet as a layer: short convolutions, then a state in which each token partly replaces the value stored under its
key."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.delta import delta_rule
from brl_jax.fields import Natural
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import dense, head_norm, merge_heads, project_unrotated
from brl_jax.layers.recurrent.convolved_layer import Convolutions, ConvolvedLayer
from brl_jax.layers.recurrent.gated_deltanet import unit
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(RecurrentConfig):
    """The delta rule (Yang et al. 2024, arXiv:2406.06484)."""

    bidirectional: ClassVar[bool] = False

    conv_size: Natural = 4
    """Width in tokens of the convolutions of queries, keys and values; 0 disables them."""


class DeltaNet(ConvolvedLayer, config=DeltaNetConfig):
    """`delta_rule` on SiLU of the convolved projections, as in the paper's section 3.3, followed by a norm of each
    head. Queries and keys are divided by their l2 norms.

    It uses no rotary positions, because the recurrence already depends on the order of the tokens.
    """

    def convolved(self) -> dict[str, tuple[int, ...]]:
        return super().convolved() if self.mechanism.conv_size else {}

    def convolved_attention(self, x: Float[Array, "B T D"], convolve: Convolutions) -> Attention:
        d, m = self.dimensions, self.mechanism

        def activated(part: Array, axis: str, name: str) -> Array:
            if not m.conv_size:
                return jax.nn.silu(part)
            return convolve(part, axis, "head_dim", name=f"{name}_conv")

        projected = zip(
            project_unrotated(d, x), ("heads", "kv_heads", "kv_heads"), ("query", "key", "value"), strict=True
        )
        query, key, value = (activated(*part) for part in projected)
        beta = jax.nn.sigmoid(dense(d, d.num_kv_heads, ("embed", "kv_heads"), name="beta")(x))
        function = functools.partial(delta_rule, beta=beta, chunk_size=m.chunk_size)
        return Attention(function, unit(query), key, value)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        d = self.dimensions
        return merge_heads(d, head_norm(d, d.norm, name="head_norm")(attended))
