"""BSBR as a layer: chunks that retrieve from earlier chunks, and a cache of the chunks' summaries."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.bsbr import BSBRState, bsbr_attention, init_bsbr_state
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import parameter, project_qkv, scale_scores, to_heads
from brl_jax.layers.core.protocol import LayerCall, Mechanism
from brl_jax.layers.recurrent.recurrent_layer import RecurrentLayer


@dataclasses.dataclass(frozen=True)
class BSBRConfig(Mechanism):
    """Softmax attention inside chunks, and retrieval of whole chunks between them (the BSBR article)."""

    chunk_size: Count = 64
    """Tokens in a chunk; changes results."""
    num_compressed: Count | None = None
    """Size to which each chunk's key-value product is compressed, for each head; None keeps all head_dim^2 entries."""


class BSBRAttention(RecurrentLayer, config=BSBRConfig):
    """`bsbr_attention`. Queries and keys inside the chunks are rotated; the retrieval's are not.

    A learned strength for each head multiplies what is retrieved. It starts at 1 / chunk_size, which turns the
    article's sum of a chunk's products into their mean: the sum would be much larger than the chunk's own output.
    """

    def init_state(self, batch: int, length: int) -> BSBRState:
        m, d = self.mechanism, self.dimensions
        return init_bsbr_state(
            batch, d.num_kv_heads, d.head_dim, length=length, num_heads=d.num_heads,
            num_compressed=m.num_compressed, chunk_size=m.chunk_size, dtype=d.dtype,
        )  # fmt: skip

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        m, d = self.mechanism, self.dimensions
        query, key, value = project_qkv(d, x, call.positions)
        function = functools.partial(
            bsbr_attention,
            retrieval_query=scale_scores(to_heads(d, x, "retrieval_query"), d.head_score_factor),
            retrieval_key=to_heads(d, x, "retrieval_key", "kv_heads"),
            compression=None if m.num_compressed is None else self.compression(m.num_compressed),
            strength=parameter(
                self, "strength", nn.initializers.constant(1 / m.chunk_size), (d.num_heads,), ("heads",)
            ),
            chunk_size=m.chunk_size,
        )
        return Attention(function, query, key, value)

    def compression(self, numbers: int) -> tuple[Any, Any]:
        """Returns linear maps from a key-value product to `numbers` entries and back, which all heads share."""
        size = self.dimensions.head_dim
        down = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=(0, 1), out_axis=2)
        up = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(1, 2))
        return (
            parameter(self, "compress", down, (size, size, numbers), ("head_dim", None, None)),
            parameter(self, "expand", up, (numbers, size, size), (None, "head_dim", None)),
        )
