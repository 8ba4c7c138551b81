"""DeltaNet as a layer: a state in which each token replaces part of the value stored under its key."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_at_least
from brl_jax.attention.recurrent.delta import DeltaState, delta_rule, init_delta_state
from brl_jax.layers.core.modules import dense, head_norm, merge_heads, project_unrotated
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.layers.recurrent.state_layer import StateAttention, StateLayer


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(Mechanism):
    """The delta rule (Yang et al. 2024, arXiv:2406.06484)."""

    bidirectional: ClassVar[bool] = False
    linear_cost: ClassVar[bool] = True
    packs: ClassVar[bool] = True

    chunk_size: int = 64
    """Tokens of a chunk; changes time and memory, not results."""

    def __post_init__(self):
        check_at_least(self, "chunk_size")

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return DeltaNet(self, dimensions, **kwargs)


class DeltaNet(StateLayer):
    """`delta_rule` on SiLU of the projections, as in the paper's section 3.3, with a norm of each head after it.

    There are no rotary positions, because the recurrence itself depends on the order of the tokens.
    """

    def init_state(self, batch: int, length: int) -> DeltaState:
        d = self.dimensions
        return init_delta_state(batch, d.num_kv_heads, d.head_dim, d.head_dim)

    def attention(self, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]) -> StateAttention:
        d = self.dimensions
        query, key, value = (jax.nn.silu(part) for part in project_unrotated(d, x))
        beta = jax.nn.sigmoid(dense(d, d.num_kv_heads, ("embed", "kv_heads"), name="beta")(x))
        function = functools.partial(delta_rule, query, key, beta=beta, chunk_size=self.mechanism.chunk_size)
        return StateAttention(function, value)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return merge_heads(self.dimensions, head_norm(self.dimensions, name="head_norm")(attended))
