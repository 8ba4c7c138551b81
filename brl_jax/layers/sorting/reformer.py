"""Reformer's attention among tokens with the same hash, as a layer; its cache has all tokens and their hashes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Float

from brl_jax.attention.sorting.reformer import (
    ReformerState,
    init_reformer_state,
    reformer_attention,
    reformer_rotations,
)
from brl_jax.fields import Count, Even, Seed
from brl_jax.layers.core.attention_layer import Attention, StateLayer
from brl_jax.layers.core.modules import rotated, sampled, to_heads
from brl_jax.layers.core.protocol import LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class ReformerConfig(Mechanism):
    """Softmax attention among the tokens that a random hash puts into the same bucket (Reformer, arXiv:2001.04451).

    The cost is linear up to a factor of the logarithm of the length; generation keeps all tokens. Queries and keys are
    the same. The paper's reversible residual connections, which save memory, are the network's option `reversible`."""

    linear_cost: ClassVar[bool] = True

    num_rounds: Count = 4
    """Rounds of hashing."""
    num_buckets: Even = 32
    """Buckets in a round, an even number; the paper uses 2 length / chunk_size."""
    chunk_size: Count = 64
    """Tokens in a chunk. A token sees the tokens of its bucket in its chunk and in the one before it."""
    seed: Seed = 0
    """Seed of the random directions. If the network is called with deterministic=False and has a key "sample" among its
    rngs, as in training, each layer draws its directions from that key instead."""


class ReformerAttention(StateLayer, config=ReformerConfig):
    """Keys have length 1, so muP's factor for wider heads does not apply."""

    mechanism: ReformerConfig

    def init_cache(self, batch: int, length: int) -> ReformerState:
        d, m = self.dimensions, self.mechanism
        return init_reformer_state(
            batch, d.num_kv_heads, d.head_dim, length=length, num_heads=d.num_heads, num_rounds=m.num_rounds,
            num_buckets=m.num_buckets, dtype=d.dtype,
        )  # fmt: skip

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        query, value = to_heads(d, x, "query"), to_heads(d, x, "value", "kv_heads")
        query = rotated(d, query, call.positions)

        def draw(key: Any) -> Array:
            return reformer_rotations(key, d.head_dim, num_rounds=m.num_rounds, num_buckets=m.num_buckets)

        rotations = sampled(self, draw, m.seed, None if call.deterministic else "sample")

        def attend(query: Array, key: Array, value: Array, **options: Any) -> Any:
            return reformer_attention(query, value, rotations=rotations, chunk_size=m.chunk_size, **options)

        return Attention(attend, query, query, value)
