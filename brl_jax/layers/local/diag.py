"""DiagAttention as a layer: block-diagonal attention, with a cache of the current block."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.local.diag import (
    DiagScore,
    DiagState,
    diag_attention,
    init_diag_state,
)
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, StateLayer
from brl_jax.layers.core.modules import head_norm, merge_heads, project_qkv
from brl_jax.layers.core.protocol import LayerCall, Mechanism, NormKind


@dataclasses.dataclass(frozen=True)
class DiagConfig(Mechanism):
    """Attention inside blocks of the sequence that do not see each other (TransNormer, arXiv:2210.10340, section
    4.3)."""

    linear_cost: ClassVar[bool] = True

    block_size: Count = 64
    """Tokens in a block."""
    score: DiagScore = "softmax"
    """How scores become weights: "softmax" (T2), or "relu" with a norm over the merged heads (T1, as in ReLA)."""
    norm: NormKind = "rms"
    """The norm over the merged heads for score "relu": "rms" or "layer"."""


class DiagAttention(StateLayer, config=DiagConfig):
    mechanism: DiagConfig

    def init_cache(self, batch: int, length: int) -> DiagState:
        """Returns an empty cache for the keys and values of one block."""
        d = self.dimensions
        block_size = self.mechanism.block_size
        return init_diag_state(batch, d.num_kv_heads, d.head_dim, block_size=block_size, dtype=d.dtype)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        m = self.mechanism
        function = functools.partial(diag_attention, block_size=m.block_size, score=m.score)
        return Attention(function, *project_qkv(self.dimensions, x, call.positions))

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        d, m = self.dimensions, self.mechanism
        if m.score == "relu":
            attended = head_norm(d, m.norm, name="attended_norm", merged=True)(attended)
        return merge_heads(d, attended)
