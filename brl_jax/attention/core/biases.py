"""Position biases added to attention logits, computed from positions so that no (T, S) array is stored.

A bias is a pytree, so its arrays can be differentiated, sharded and donated. Attention functions call it on one block
at a time: with query positions (T,) and key positions (S,) it returns (N, T, S) in float32. See Press et al. 2022
(ALiBi, arXiv:2108.12409) and Raffel et al. 2020 (T5, arXiv:1910.10683).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.rotary import rotate


@runtime_checkable
class PositionBias(Protocol):
    """What an attention function accepts as a structured `bias`."""

    def __call__(
        self, query_positions: Int[Array, "T"], key_positions: Int[Array, "S"]
    ) -> Float[Array, "N T S"]: ...


@runtime_checkable
class DistanceBias(PositionBias, Protocol):
    """A `PositionBias` that depends only on the distance, query position minus key position. Kernels can add it.

    Attributes:
      farthest: beyond this distance, on either side, the bias no longer changes; None if it always does.
    """

    @property
    def farthest(self) -> int | None: ...

    def by_distance(self, distances: Int[Array, "D"]) -> Float[Array, "N D"]:
        """The bias of each head at each distance, in float32. Distances may be negative."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ALiBi:
    """A bias that decreases linearly with the distance: -slope * |i - j|, with one slope per head.

    Attributes:
      slopes: (N,) float32; `alibi_slopes(N)` gives the published geometric sequence.
    """

    slopes: Float[Array, "N"]

    @property
    def farthest(self) -> None:
        return None

    def __call__(self, query_positions, key_positions):
        distance = jnp.abs(query_positions[:, None] - key_positions[None, :])
        return -self.checked_slopes()[:, None, None] * distance.astype(jnp.float32)[None]

    def by_distance(self, distances):
        return -self.checked_slopes()[:, None] * jnp.abs(distances).astype(jnp.float32)

    def checked_slopes(self) -> Float[Array, "N"]:
        """The slopes; raises ValueError unless they are a vector, one for each head."""
        if jnp.ndim(self.slopes) != 1:
            raise ValueError(
                f"slopes of ALiBi must have shape (heads,), as alibi_slopes(heads) gives, got {self.slopes!r}"
            )
        return self.slopes


def alibi_slopes(num_heads: int) -> Float[Array, "N"]:
    """The slopes of the ALiBi paper, 2^(-8 i / N). If N is not a power of two, the rest come from the next power."""
    if num_heads < 1:
        raise ValueError(f"num_heads must be at least 1, got {num_heads}")
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    extra = [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return jnp.asarray(slopes + extra, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class T5Bias:
    """A learned number for each head and bucket of relative positions; large distances share buckets.

    Attributes:
      table: (num_buckets, N) float, learned.
      max_distance: all distances from this one on share the last bucket.
      bidirectional: whether half of the buckets are for keys after the query; otherwise all such keys share bucket 0.
    """

    table: Float[Array, "buckets N"]
    max_distance: int = dataclasses.field(default=128, metadata={"static": True})
    bidirectional: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def farthest(self) -> int:
        return self.max_distance

    def __call__(self, query_positions, key_positions):
        return self._look_up(key_positions[None, :] - query_positions[:, None])

    def by_distance(self, distances):
        return self._look_up(-distances)

    def _look_up(self, relative: Int[Array, "*shape"]) -> Float[Array, "N *shape"]:
        bucket = t5_bucket(relative, self.table.shape[0], self.max_distance, self.bidirectional)
        return jnp.moveaxis(jnp.take(self.table.astype(jnp.float32), bucket, axis=0), -1, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RotaryBias:
    """A learned function of the distance: the product of two vectors, rotated to the query's and the key's position.

    Gated attention units use it on long sequences (Hua et al. 2022, arXiv:2202.10447, appendix B).

    Attributes:
      left, right: (N, H) float with H even, learned.
      theta: base of the frequencies.
    """

    left: Float[Array, "N H"]
    right: Float[Array, "N H"]
    theta: float = dataclasses.field(default=10000.0, metadata={"static": True})

    def __call__(self, query_positions, key_positions):
        left = self.factor(self.left, query_positions[None])[0]
        right = self.factor(self.right, key_positions[None])[0]
        return jnp.einsum("tnh,snh->nts", left, right)

    @property
    def farthest(self) -> None:
        return None

    def by_distance(self, distances):
        far = jnp.abs(distances)[None]
        vectors = (self.left, self.right)
        # Only the relative rotation matters, so turn the later position's vector by the distance.
        ahead, behind = (
            jnp.einsum("dnh,nh->nd", self.factor(a, far)[0], b.astype(jnp.float32), precision="highest")
            for a, b in (vectors, vectors[::-1])
        )
        return jnp.where(distances >= 0, ahead, behind)

    def factor(self, vector: Float[Array, "N H"], positions: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
        """`left` or `right`, rotated to each position, in float32. The bias is the product of the two."""
        rows = jnp.broadcast_to(vector.astype(jnp.float32), (*positions.shape, *vector.shape))
        return rotate(rows, positions, self.theta)


def t5_bucket(
    relative: Int[Array, "*shape"], num_buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "*shape"]:
    """The bucket of a relative position (key minus query): exact when near, logarithmic up to max_distance."""
    if num_buckets < 4 or max_distance <= num_buckets // 2:
        raise ValueError(
            f"T5 buckets need num_buckets >= 4 and max_distance > num_buckets / 2, "
            f"got num_buckets={num_buckets}, max_distance={max_distance}"
        )
    first = jnp.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        first = jnp.where(relative > 0, num_buckets, 0)
        distance = jnp.abs(relative)
    else:
        distance = jnp.maximum(-relative, 0)
    exact = num_buckets // 2
    log_ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = exact + (log_ratio * (num_buckets - exact)).astype(relative.dtype)
    return first + jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))
