"""MLR attention as a layer, whose cache has only the keys of each level's current block."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.attention.structured.mlr_generation import MLRState, init_mlr_state
from brl_jax.attention.structured.mlr_levels import (
    check_block_sizes,
    check_ranks,
    doubling_block_sizes,
    score_scales,
)
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, StateLayer
from brl_jax.layers.core.modules import project_qkv
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism


@dataclasses.dataclass(frozen=True)
class MLRConfig(Mechanism):
    """Softmax attention whose scores use more features between near tokens than between far ones (MLR attention,
    arXiv:2509.07963, eq. 9)."""

    ranks: tuple[Count, ...] | None = None
    """Features of each level, from the coarsest to the finest; they sum to the head dimension. None for 8/16, 2/16,
    2/16, 2/16, 1/16, 1/16 of it (32, 8, 8, 8, 4, 4 of 64), or halves if it is not a multiple of 16."""
    context: Count | None = None
    """Training context T: level l has blocks of T / 2^(l-1) tokens, except that the first level is always one block
    over the whole sequence. None follows the sequence: T is its length, or the cache's in generation. Training a
    language model sets it to the length of its rows (`Mechanism.for_training`)."""
    block_sizes: tuple[Count | None, ...] | None = None
    """Tokens in a block of each level, each a multiple of the next; overrides `context`. None for a
    level makes it one block over the whole sequence."""
    qk_norm: bool = True
    """Whether to normalise queries and keys over the whole head before they are rotated and cut into levels."""
    score_scale: float | None = 1.0
    """A level's scores are its products times this, over its rank; muP uses 8 for heads of 64 (arXiv:2509.07963,
    E.2). None divides by the root of the rank."""

    def __post_init__(self):
        if self.block_sizes is not None:
            if self.ranks is None:
                raise ValueError(
                    f"block_sizes need ranks, one for each size, got only block_sizes={self.block_sizes}"
                )
            check_block_sizes(self.block_sizes, len(self.ranks))

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        check_ranks(self.level_ranks(dimensions.head_dim), dimensions.head_dim)

    def level_ranks(self, head_dim: int) -> tuple[int, ...]:
        if self.ranks is not None:
            return self.ranks
        if head_dim % 16 == 0:
            return tuple(share * head_dim // 16 for share in (8, 2, 2, 2, 1, 1))
        return (head_dim - head_dim // 2, head_dim // 2) if head_dim > 1 else (1,)

    def levels(self, head_dim: int, length: int) -> dict[str, Any]:
        """Returns the arguments of `mlr_attention` that describe the levels, for sequences of `length` tokens."""
        ranks = self.level_ranks(head_dim)
        sizes = self.block_sizes
        if sizes is None:
            sizes = doubling_block_sizes(length if self.context is None else self.context, len(ranks))
        return {"ranks": ranks, "block_sizes": sizes}

    def for_training(self, length: int) -> MLRConfig:
        # Other block sizes in generation would be a different network.
        free = self.context is None and self.block_sizes is None
        return dataclasses.replace(self, context=length) if free else self


class MLRAttention(StateLayer, config=MLRConfig):
    mechanism: MLRConfig

    def init_cache(self, batch: int, length: int) -> MLRState:
        """Returns an empty cache for the values of `length` tokens and the keys of one block of each level."""
        d = self.dimensions
        levels = self.mechanism.levels(d.head_dim, length)
        return init_mlr_state(batch, d.num_kv_heads, d.head_dim, length=length, **levels, dtype=d.dtype)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m, cache = self.dimensions, self.mechanism, call.cache
        levels = m.levels(d.head_dim, x.shape[1] if cache is None else cache.value.shape[2])
        scale = score_scales(m.score_scale, levels["ranks"])
        heads = project_qkv(d, x, call.positions, qk_norm=m.qk_norm, root_scores=m.score_scale is None)
        return Attention(functools.partial(mlr_attention, scale=scale, **levels), *heads)
