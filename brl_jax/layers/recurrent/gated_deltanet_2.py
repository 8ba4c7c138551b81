"""Gated DeltaNet-2 as a layer: Kimi Delta Attention with separate gates for erasing and writing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.delta import gated_delta_rule_2
from brl_jax.layers.core.modules import dense
from brl_jax.layers.recurrent.kda import KDA, KDAConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaNet2Config(KDAConfig):
    """Gated DeltaNet-2 (Hatamizadeh et al. 2026, arXiv:2605.22791)."""


class GatedDeltaNet2(KDA, config=GatedDeltaNet2Config):
    """`KDA` with `gated_delta_rule_2`: beta gives way to erase = sigmoid(x W_b) for each feature of the keys and
    write = sigmoid(x W_w) for each feature of the values."""

    def rule(self, x: Float[Array, "B T D"]) -> Callable[..., Any]:
        d = self.dimensions

        def gate(name: str) -> Array:
            axes = ("embed", "kv_heads", "head_dim")
            return jax.nn.sigmoid(dense(d, (d.num_kv_heads, d.head_dim), axes, name=name)(x))

        return functools.partial(gated_delta_rule_2, erase=gate("erase"), write=gate("write"))
