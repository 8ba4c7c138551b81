"""Bilinear MLR and bilinear BTT attention as layers, with a cache of the keys' features."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.structured.bilinear import (
    bilinear_btt_keys,
    bilinear_btt_queries,
    bilinear_mlr_counts,
    bilinear_mlr_features,
    btt_factors,
)
from brl_jax.attention.structured.feature_attention import feature_attention
from brl_jax.attention.structured.mlr_levels import check_ranks, feature_scales, score_scales
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import parameter, to_heads
from brl_jax.layers.core.protocol import Dimensions, LayerCall, Mechanism
from brl_jax.structured import limit_rms, rms_limit


@dataclasses.dataclass(frozen=True)
class BilinearMLRConfig(Mechanism):
    """Softmax attention whose scores are x_i^T W x_j with a multi-level low-rank matrix W of high rank
    (arXiv:2509.07963, eq. 6). Time is quadratic in the length, memory linear."""

    packs: ClassVar[bool] = True

    ranks: tuple[Count, ...] | None = None
    """Rank of each level; level l cuts the channels into 2^(l-1) blocks. The ranks sum to head_dim. None uses equal
    ranks for the fewest levels that give the matrix full rank, as far as the width can be halved."""
    normalize: bool = True
    """Whether to apply layer norms to each level's query and key features."""
    limit_weights: bool = True
    """Whether to keep the RMS of each weight at or below its initial value (arXiv:2509.07963, E.1)."""
    score_scale: float | None = None
    """A level's scores are its products times this, over its number of features; None divides by the root of that
    number."""

    def level_ranks(self, dimensions: Dimensions) -> tuple[int, ...]:
        if self.ranks is not None:
            return self.ranks
        width, size = dimensions.d_model, dimensions.head_dim
        levels = 1
        # Levels of equal rank have (2^levels - 1) / levels times head_dim features in total.
        while (2**levels - 1) * size < width * levels and levels < size and width % 2**levels == 0:
            levels += 1
        return tuple(size // levels + (level < size % levels) for level in range(levels))

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        ranks = self.level_ranks(dimensions)
        check_ranks(ranks, dimensions.head_dim)
        if dimensions.d_model % 2 ** (len(ranks) - 1):
            raise ValueError(
                f"ranks of {len(ranks)} levels need a d_model that is a multiple of {2 ** (len(ranks) - 1)}, got "
                f"{dimensions.d_model}"
            )


@dataclasses.dataclass(frozen=True)
class BilinearBTTConfig(Mechanism):
    """Softmax attention whose scores are x_i^T W x_j with a block tensor-train matrix W of full rank (arXiv:2509.07963,
    eq. 7). Time is quadratic in the length, memory linear."""

    packs: ClassVar[bool] = True

    rank: Count = 1
    """The rank t of the block tensor train; the paper uses 1 and 2."""
    normalize: bool = True
    """Whether to apply a layer norm to the keys over the width."""
    limit_weights: bool = True
    """Whether to keep the RMS of each weight at or below its initial value (arXiv:2509.07963, E.1)."""
    score_scale: float | None = None
    """Scores are products times this, over the width; None divides by its root."""

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        try:
            btt_factors(dimensions.d_model)
        except ValueError as error:
            raise ValueError(f"d_model: {error}") from None
        if dimensions.rope_theta is not None and dimensions.d_model % 2:
            raise ValueError(f"d_model must be even for rotary positions, got {dimensions.d_model}")


class BilinearLayer(AttentionLayer):
    """`feature_attention` on features that the mechanism computes; see `brl_jax.layers.core.protocol` for the call."""

    def features(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        """Returns query (B, T, N, F), already multiplied by the scores' scale, and key (B, T, K, F)."""
        raise NotImplementedError

    def weight(
        self, name: str, shape: tuple[int, ...], heads: int, contracted: tuple[int, ...], fan_out: int
    ) -> Array:
        """Returns a weight with heads on axis `heads`; products contract axes `contracted` and have fan_out outputs."""
        fan = math.prod(shape[axis] for axis in contracted), fan_out
        axes: list[str | None] = ["block_in" if axis in contracted else None for axis in range(len(shape))]
        axes[heads] = "heads" if shape[heads] == self.dimensions.num_heads else "kv_heads"
        kernel = parameter(self, name, nn.initializers.normal(rms_limit(*fan)), shape, tuple(axes))
        return limit_rms(kernel, *fan) if self.mechanism.limit_weights else kernel

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d = self.dimensions
        value = to_heads(d, x, "value", "kv_heads")
        query, key = self.features(x.astype(d.dtype))
        if d.rope_theta is not None:
            query, key = (_rotate_pairs(features, call.positions, d.rope_theta) for features in (query, key))
        return Attention(feature_attention, query, key, value)


def _rotate_pairs(x: Float[Array, "B T N F"], positions: Any, theta: float) -> Array:
    """Rotates the features by their positions, except the last of an odd number."""
    even = x.shape[-1] // 2 * 2
    return jnp.concatenate([rotate(x[..., :even], positions, theta), x[..., even:]], axis=-1)


class BilinearMLRAttention(BilinearLayer, config=BilinearMLRConfig):
    """Features as in `bilinear_mlr_attention`."""

    mechanism: BilinearMLRConfig

    def key_shape(self) -> tuple[int, int]:
        ranks = self.mechanism.level_ranks(self.dimensions)
        return self.dimensions.num_kv_heads, sum(rank * 2**level for level, rank in enumerate(ranks))

    def features(self, x):
        d, m = self.dimensions, self.mechanism
        sides = []
        for side, heads in (("query", d.num_heads), ("key", d.num_kv_heads)):
            weights, scales = [], []
            for level, rank in enumerate(m.level_ranks(d)):
                blocks = 2**level
                size = d.d_model // blocks
                weights.append(
                    self.weight(f"{side}_{level}", (blocks, size, heads, rank), 2, (1,), heads * rank)
                )
                if m.normalize:
                    scales.append(
                        parameter(
                            self,
                            f"{side}_norm_{level}",
                            nn.initializers.ones_init(),
                            (blocks * rank,),
                            (None,),
                        )
                    )
            sides.append((weights, scales if m.normalize else None))
        query, key = (
            bilinear_mlr_features(
                x, weights, norm_scales=scales, normalize=m.normalize, epsilon=d.norm_epsilon
            )
            for weights, scales in sides
        )
        counts = bilinear_mlr_counts(sides[0][0])
        factor = d.head_score_factor if m.score_scale is None else 1.0
        scales = [scale * factor for scale in score_scales(m.score_scale, counts)]
        return query * feature_scales(counts, scales, query.dtype), key


class BilinearBTTAttention(BilinearLayer, config=BilinearBTTConfig):
    """Features as in `bilinear_btt_attention`: a query is the token itself, and each head has different keys."""

    mechanism: BilinearBTTConfig

    def key_shape(self) -> tuple[int, int]:
        return self.dimensions.num_heads, self.dimensions.d_model

    def features(self, x):
        d, m = self.dimensions, self.mechanism
        heads, width, t = d.num_heads, d.d_model, m.rank
        a, b = btt_factors(width)
        c, e = a, b
        right = self.weight("right", (c, e, heads, b, t), 2, (1,), heads * b * t)
        left = self.weight("left", (heads, b, a, c, t), 0, (3, 4), a)
        scale = None
        if m.normalize:
            scale = parameter(self, "key_norm", nn.initializers.ones_init(), (width,), ("embed",))
        key = bilinear_btt_keys(
            x, right, left, norm_scale=scale, normalize=m.normalize, epsilon=d.norm_epsilon
        )
        factor = d.width_score_factor if m.score_scale is None else 1.0
        return bilinear_btt_queries(x, heads, score_scales(m.score_scale, [width])[0] * factor), key
