"""Hopfield attention as a layer: full attention whose queries first move towards the keys."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array

from brl_jax.attention.dense.hopfield import hopfield_attention
from brl_jax.fields import Count, Positive
from brl_jax.layers.core.attention_layer import AttentionLayer
from brl_jax.layers.core.modules import scale_scores
from brl_jax.layers.core.protocol import Mechanism


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

    def attend(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        m, factor = self.mechanism, self.dimensions.head_score_factor
        if factor == 1.0:
            return hopfield_attention(query, key, value, steps=m.steps, scale=m.beta, **options)
        # The queries already have muP's factor, but it would only act on the first step, so move it into the scale.
        beta = query.shape[-1] ** -0.5 if m.beta is None else m.beta
        query = scale_scores(query, 1 / factor)
        return hopfield_attention(query, key, value, steps=m.steps, scale=beta * factor, **options)
