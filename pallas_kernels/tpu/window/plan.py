"""The steps of a call of sliding-window attention, worked out in Python from shapes alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from pallas_kernels.tpu.core.distances import RelativeBias
from pallas_kernels.tpu.core.heads import HeadLayout


@dataclasses.dataclass(frozen=True)
class WindowPlan:
    """Query i sees key j iff i - left <= j <= i + right. A grid step processes `block` queries in tiles of `tile`.

    A step is unrolled over its tiles, and a tile of queries reads the tiles of keys at distances `before` to `after`.
    The two tiles at the ends of the window are usually half visible each, in complementary halves. Such a pair is
    folded into one tile of scores, which halves the exponentials spent on masked entries.
    """

    left: int
    right: int
    length: int
    tile: int
    block: int

    def __post_init__(self) -> None:
        if self.left < 0 or self.right < 0:
            raise ValueError(f"left and right must be at least 0, got {self.left} and {self.right}")
        if self.tile % 128 or self.block % self.tile:
            raise ValueError(
                f"block must be a multiple of tile and tile of 128, got block {self.block}, tile {self.tile}"
            )
        if self.halo > self.block:
            raise ValueError(
                f"block must hold a window side ({max(self.left, self.right)} keys), got {self.block}"
            )

    @property
    def tiles(self) -> int:
        """Tiles in a block."""
        return self.block // self.tile

    @property
    def blocks(self) -> int:
        """Blocks in the sequence; the last one may be incomplete."""
        return -(-self.length // self.block)

    @property
    def before(self) -> int:
        """Tiles of keys before its own that a tile of queries reads."""
        return -(-self.left // self.tile)

    @property
    def after(self) -> int:
        """Tiles of keys after its own that a tile of queries reads."""
        return -(-self.right // self.tile)

    @property
    def halo(self) -> int:
        """Rows of the neighbouring blocks that a step reads on each side: a power of two of tiles."""
        side = max(self.before, self.after, 1)
        return self.tile * (1 << (side - 1).bit_length())

    @property
    def sides(self) -> tuple[int, ...]:
        """The blocks of keys that a step reads: its own (0) and, if needed, those before (-1) and after (1)."""
        return (0, *((-1,) if self.left else ()), *((1,) if self.right else ()))

    @property
    def unrolled(self) -> int:
        """Number of pairs of tiles over which a step is unrolled."""
        return self.tiles * len(self.distances())

    @property
    def late(self) -> bool:
        """Whether the gradients of a block of keys wait for the next step's queries.

        If no query sees a key after it, the backward pass visits the blocks from the last to the first, and a block of
        keys has seen all later queries when its own step begins. Otherwise it visits the blocks in order and needs one
        more step.
        """
        return self.right > 0

    @property
    def backward_steps(self) -> int:
        """Number of steps of the backward pass."""
        return self.blocks + self.late

    def backward_block(self, step):
        """Returns a backward step's block of queries; the extra last step stays on the last block."""
        return jnp.minimum(step, self.blocks - 1) if self.late else self.blocks - 1 - step

    def written_block(self, step):
        """Returns the block of keys whose gradients a backward step writes."""
        return jnp.maximum(step - 1, 0) if self.late else self.blocks - 1 - step

    @property
    def ragged(self) -> bool:
        """Whether the last block is incomplete."""
        return self.length % self.block != 0

    def distances(self) -> range:
        """Returns the distances, in tiles, from a tile of queries to the tiles of keys that it reads."""
        return range(-self.before, self.after + 1)

    def _seen(self, distance: int) -> Bool[np.ndarray, "tile tile"]:
        """Returns the (key, query) mask inside one pair of tiles."""
        index = np.arange(self.tile)
        offset = distance * self.tile + index[:, None] - index[None, :]
        return (offset >= -self.left) & (offset <= self.right)

    @functools.lru_cache(maxsize=256)  # noqa: B019 (plans are small)
    def columns(self) -> tuple[tuple[tuple[int, ...], bool], ...]:
        """Returns the tiles of scores after folding: which distances share a tile, and whether some entry stays
        masked."""
        partial = {d: seen for d in self.distances() if not (seen := self._seen(d)).all()}
        columns: list[tuple[tuple[int, ...], bool]] = []
        done: set[int] = set()
        for d in self.distances():
            if d in done:
                continue
            partner = None
            if d in partial:
                partner = next(
                    (e for e in partial if e > d and e not in done and not (partial[d] & partial[e]).any()),
                    None,
                )
            if partner is None:
                columns.append(((d,), d in partial))
            else:
                done.add(partner)
                columns.append(((d, partner), not (partial[d] | partial[partner]).all()))
        return tuple(columns)

    def visible(self, distance: int, offset: Int[Array, "tile tile"]) -> Bool[Array, "tile tile"] | None:
        """Returns the mask at a distance, from key-minus-query offsets inside the tile; None if everything is
        visible."""
        low, high = distance * self.tile - (self.tile - 1), distance * self.tile + (self.tile - 1)
        mask = None
        if low < -self.left:
            mask = offset >= -self.left - distance * self.tile
        if high > self.right:
            below = offset <= self.right - distance * self.tile
            mask = below if mask is None else mask & below
        return mask


def tile_offsets(tile: int) -> Int[Array, "tile tile"]:
    """Returns key index minus query index inside a pair of tiles, keys in rows."""
    shape = (tile, tile)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0) - jax.lax.broadcasted_iota(jnp.int32, shape, 1)


@dataclasses.dataclass(frozen=True)
class WindowCall:
    """Everything static about one call of the window kernels.

    Attributes:
      forward, backward: the plans of the two passes.
      forward_limit, backward_limit: VMEM limits in bytes to request from the compiler; None requests no limit.
      layout: how heads lie in lanes.
      bias: what is added to the scores by distance; None for nothing.
      scale: multiplies the scores; positive.
      logits_soft_cap: bounds the scaled scores; None leaves them unbounded.
      with_log_sum: whether to return the log-sum-exp too.
      interpret: passed to `pl.pallas_call`.
    """

    forward: WindowPlan
    backward: WindowPlan
    forward_limit: int | None
    backward_limit: int | None
    layout: HeadLayout
    bias: RelativeBias | None = None
    scale: float = 1.0
    logits_soft_cap: float | None = None
    with_log_sum: bool = False
    interpret: bool | pltpu.InterpretParams = False

    @property
    def cap(self) -> float | None:
        """The bound on unscaled scores, which the kernels work with."""
        return None if self.logits_soft_cap is None else self.logits_soft_cap / self.scale
