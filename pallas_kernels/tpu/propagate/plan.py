"""The steps of a call of propagate: its block sizes, their VMEM, and what a grid step loads."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.scores import Score, elementwise_weights
from pallas_kernels.tpu.core import arithmetic, heads
from pallas_kernels.tpu.core.arithmetic import LOG2E, MASKED, NONE_YET
from pallas_kernels.tpu.core.chips import GRANTED_MIB, MIB, resolve_chip, vmem_limit
from pallas_kernels.tpu.core.heads import HeadLayout, layout_of
from pallas_kernels.tpu.core.inputs import (
    Shaped,
    check_attention,
    check_compressed,
    check_multiple_of_128,
)
from pallas_kernels.tpu.core.score_bias import ScoreBias, described

#: The compressed tokens are padded to a multiple of this number of rows, which a bfloat16 register has.
_ROWS = 16


@dataclasses.dataclass(frozen=True)
class PropagateCall:
    """Everything static about one call. A grid step processes `block` queries in tiles of `tile`.

    Attributes:
      length: queries.
      keys, padded_keys: compressed tokens, without and with padding.
      layout: how heads lie in lanes.
      vmem_limit: in bytes, to request from the compiler; None requests no limit.
      bias: what is added to the scores; None for nothing.
      scale: multiplies the scores; positive.
      score: the score function.
      interpret: passed to `pl.pallas_call`.
    """

    length: int
    keys: int
    padded_keys: int
    tile: int
    block: int
    layout: HeadLayout
    vmem_limit: int | None
    bias: ScoreBias | None = None
    scale: float = 1.0
    score: Score = "softmax"
    interpret: bool | pltpu.InterpretParams = False

    @property
    def ragged(self) -> bool:
        """Whether the last block is incomplete."""
        return self.length % self.block != 0

    @property
    def units(self) -> int:
        """Products in a grid step: one for each tile of queries and head."""
        return self.block // self.tile * self.layout.packed

    def grid(self, query: Float[Array, "B T L"]) -> tuple[int, int, int]:
        """Returns batch, tiles of heads, blocks of queries."""
        return query.shape[0], query.shape[2] // self.layout.width, -(-self.length // self.block)

    def specs(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        """Returns the specs of an array with rows of queries and of one with rows of compressed tokens."""
        width = self.layout.width
        return (
            pl.BlockSpec((1, self.block, width), lambda b, t, i: (b, i, t)),
            pl.BlockSpec((1, self.padded_keys, width), lambda b, t, i: (b, 0, t)),
        )

    def bias_spec(self, bias: ScoreBias, gradient: bool) -> pl.BlockSpec:
        """Returns the spec of a bias (see `score_bias.lay_out`) or of its gradient."""
        batches, heads = gradient or bias.batches, gradient or bias.heads
        return pl.BlockSpec(
            (1, 1, self.layout.packed if heads else 1, self.padded_keys, self.block),
            lambda b, t, i: (b if batches else 0, t if heads else 0, 0, 0, i),
        )

    def biased(self, products: Float[Array, "m tile"], ref, unit: int) -> Float[Array, "m tile"]:
        """Returns unscaled scores plus the bias in `ref`, if any."""
        if ref is None:
            return products
        assert self.bias is not None
        tile, head = divmod(unit, self.layout.packed)
        bias = ref[0, 0, head if self.bias.heads else 0, :, tile * self.tile : (tile + 1) * self.tile]
        if self.ragged:
            lane = jax.lax.broadcasted_iota(jnp.int32, bias.shape, 1)
            left = self.length - pl.program_id(2) * self.block - tile * self.tile
            bias = jnp.where(lane < left, bias, 0.0)
        return products + bias

    def load(self, ref, unit: int) -> tuple[Float[Array, "tile width"], slice]:
        """Returns the queries (or output gradients) of one head and tile, zero past the end of the sequence, and their
        rows."""
        tile, head = divmod(unit, self.layout.packed)
        rows = slice(tile * self.tile, (tile + 1) * self.tile)
        x = ref[0, rows, :]
        if self.ragged:
            x = arithmetic.rows_below(x, self.length - pl.program_id(2) * self.block - tile * self.tile)
        return heads.lanes_of_head(x, head, self.layout), rows

    def weights(self, products: Float[Array, "m tile"]) -> Float[Array, "m tile"]:
        """Returns the keys' weights, in rows, from unscaled scores; padding has weight 0."""
        exists = None
        if products.shape[0] != self.keys:
            exists = jax.lax.broadcasted_iota(jnp.int32, products.shape, 0) < self.keys
        if self.score == "softmax":
            s = products if exists is None else jnp.where(exists, products, MASKED)
            top = s.max(axis=0, keepdims=True)
            # A bias may hide all keys.
            top = top if self.bias is None else jnp.maximum(top, NONE_YET)
            w = jnp.exp2((s - top) * (self.scale * LOG2E))
            total = w.sum(axis=0, keepdims=True)
            total = total if self.bias is None else jnp.where(total == 0.0, 1.0, total)
            return w * arithmetic.reciprocal(total)
        w = elementwise_weights(self.score, products * self.scale)
        return w if exists is None else jnp.where(exists, w, 0.0)


def propagate_bytes(block: int, tile: int, keys: int, width: int, itemsize: int, bias_heads: int) -> int:
    """Returns the VMEM of a step of the backward pass, which needs more than the forward pass: double-buffered blocks
    (including a bias and its gradient for each of `bias_heads` heads) and the scores in flight.

    In float32 with many keys, the compiler keeps the scores of all packed heads.
    """
    scores = 56 if itemsize == 4 and keys > 256 else 8
    blocks = 3 * block * width * itemsize + keys * width * (2 * itemsize + 8) + 8 * bias_heads * keys * block
    return 2 * blocks + scores * keys * tile * 4


def propagate_blocks(length: int, keys: int, width: int, itemsize: int, bias_heads: int) -> tuple[int, int]:
    """Returns (tile, block): queries in one product and in a grid step.

    The block is halved until it fits in the VMEM that every kernel is granted, and until padding at the end of the
    sequence is at most an eighth of its length.
    """
    tile, block, most = 256 if keys <= 256 else 128, 4096, GRANTED_MIB * MIB * 3 // 4
    while block > tile and (
        8 * (-length % block) > length
        or propagate_bytes(block, tile, keys, width, itemsize, bias_heads) > most
    ):
        block //= 2
    return tile, block


def plan_propagate(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    *,
    bias: Shaped | None = None,
    chip: str | None = None,
    block: int | None = None,
) -> PropagateCall:
    """Returns the part of a call that shapes and dtypes determine; arguments as for `propagate`.

    Raises:
      ValueError, NotImplementedError: as `propagate`, for all errors in shapes and dtypes.
    """
    kind = described(bias, None, (query.shape[0], query.shape[2], query.shape[1], key.shape[1]))
    check_attention(query, key, value)
    chip = resolve_chip(chip, query)
    _, length, count, head_dim = query.shape
    keys, itemsize = key.shape[1], query.dtype.itemsize
    if key.shape[2] != count:
        raise ValueError(f"key must have query's {count} heads, got {key.shape[2]}")
    check_compressed("key", keys)
    layout = layout_of(count, count, head_dim)
    padded = keys + -keys % _ROWS
    bias_heads = 0 if kind is None else layout.packed
    tile, chosen = propagate_blocks(length, padded, layout.width, itemsize, bias_heads)
    if block is not None:
        check_multiple_of_128(block=block)
        tile, chosen = math.gcd(tile, block), block
    needed = propagate_bytes(chosen, tile, padded, layout.width, itemsize, bias_heads)
    limit = vmem_limit("propagate", needed, chip, f"choose a block below {chosen}")
    return PropagateCall(length, keys, padded, tile, chosen, layout, limit, kind)
