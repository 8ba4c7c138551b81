"""DeltaNet as a layer: a state that writes what is new about each key and forgets the rest."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax

from brl_jax.attention.recurrent.delta import DeltaState, delta_rule, init_delta_state
from brl_jax.layers.core.modules import dense, head_norm, merge_heads, project_qkv
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.layers.recurrent.state_layer import StateLayer, check_chunk_size


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig(Mechanism):
    """The delta rule (Yang et al. 2024, arXiv 2406.06484)."""

    chunk_size: int = 64
    """Tokens of a chunk; changes time and memory, not results."""

    def __post_init__(self):
        check_chunk_size(self.chunk_size)

    @property
    def bidirectional(self) -> bool:
        return False

    @property
    def linear_cost(self) -> bool:
        return True

    @property
    def packs(self) -> bool:
        return True

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return DeltaNet(self, dimensions, **kwargs)


class DeltaNet(StateLayer):
    """`delta_rule` on SiLU of the projections, as in the paper's section 3.3, with a norm of each head after it.

    The order of the tokens is in the recurrence: there are no rotary positions.
    """

    def init_state(self, batch: int, length: int) -> DeltaState:
        d = self.dimensions
        return init_delta_state(batch, d.num_kv_heads, d.head_dim, d.head_dim)

    def run(self, x, positions, call):
        d = self.dimensions
        unrotated = dataclasses.replace(d, rope_theta=None)
        projected = project_qkv(unrotated, x, positions, root_scores=False)
        query, key, value = (jax.nn.silu(part) for part in projected)
        beta = jax.nn.sigmoid(dense(d, d.num_kv_heads, ("embed", "kv_heads"), name="beta")(x))
        call = {name: argument for name, argument in call.items() if name != "is_causal"}
        function = functools.partial(delta_rule, query, key, beta=beta, chunk_size=self.mechanism.chunk_size)
        attended, state = self.attend(function, value, call)
        return merge_heads(d, head_norm(d, name="head_norm")(attended)), state
