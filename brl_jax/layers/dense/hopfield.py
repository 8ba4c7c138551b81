"""Hopfield attention as a layer: full attention whose queries first move towards the keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.dense.hopfield import hopfield_attention
from brl_jax.fields import Count, Positive
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import project_qkv
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class HopfieldConfig(Mechanism):
    """Retrieval from a modern Hopfield network whose patterns are the keys (Ramsauer et al. 2020, arXiv:2008.02217);
    quadratic in the length."""

    packs: ClassVar[bool] = True

    steps: Count = 2
    """Number of softmaxes: all but the last move the queries towards the keys, and the last one reads the values. With
    1 it is full attention."""
    beta: Positive | None = None
    """Inverse temperature; None for 1 / sqrt(head_dim)."""


class HopfieldAttention(AttentionLayer, config=HopfieldConfig):
    mechanism: HopfieldConfig

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        # muP's factor on the queries would only act on the first step, so it is in the scale.
        beta = d.head_dim**-0.5 if m.beta is None else m.beta
        function = functools.partial(hopfield_attention, steps=m.steps, scale=beta * d.head_score_factor)
        return Attention(function, *project_qkv(d, x, call.positions, root_scores=False))
