"""The steps of a call of the recurrence: its block of tokens and heads, and what a grid step loads."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.core.chips import MIB, resolve_chip, vmem_limit, vmem_mib
from pallas_kernels.tpu.core.heads import MAX_HEAD_DIM
from pallas_kernels.tpu.core.inputs import Shaped
from pallas_kernels.tpu.recurrent.chunk import CHUNK, ROWS

#: The numbers that each token may have, in the order of their rows.
NUMBERS = ("start", "end", "log_decay", "beta")
_LANES = 128


@dataclasses.dataclass(frozen=True)
class RecurrentCall:
    """Everything static about one call. A grid step processes `chunks` chunks of one row and `heads` key heads.

    Attributes:
      heads: key heads in a grid step, whose features together fill whole registers.
      group: query heads for each key head.
      features, value_dim: of a head.
      chunks: in a grid step.
      blocks: grid steps for a row and its heads.
      numbers: the numbers that each token has, a subset of `NUMBERS`.
      by_feature: whether each feature has its own decay.
      totals: whether the state shrinks from chunk to chunk.
      weighs: whether to sum the weights.
      segments: whether tokens have segments.
      vmem_limit: in bytes, to request from the compiler; None requests no limit.
      interpret: passed to `pl.pallas_call`.
    """

    heads: int
    group: int
    features: int
    value_dim: int
    chunks: int
    blocks: int
    numbers: tuple[str, ...]
    by_feature: bool
    totals: bool
    weighs: bool
    segments: bool
    vmem_limit: int | None
    interpret: bool | pltpu.InterpretParams = False

    @property
    def tokens(self) -> int:
        """Tokens in a grid step."""
        return self.chunks * CHUNK

    def by_token(self, size: int, *, backward: bool) -> pl.BlockSpec:
        """Returns the spec of (batch, tokens, heads * size)."""
        step = self._step(backward)
        return pl.BlockSpec((1, self.tokens, self.heads * size), lambda b, h, i: (b, step(i), h))

    def by_row(self, *rows: int, backward: bool, by_head: bool = True) -> pl.BlockSpec:
        """Returns the spec of (batch, heads, *rows, tokens)."""
        step, zeros = self._step(backward), (0,) * len(rows)
        heads = self.heads if by_head else 1
        return pl.BlockSpec(
            (1, heads, *rows, self.tokens), lambda b, h, i: (b, h if by_head else 0, *zeros, step(i))
        )

    def by_head(self, *shape: int) -> pl.BlockSpec:
        """Returns the spec of (batch, heads, *shape)."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec((1, self.heads, *shape), lambda b, h, i: (b, h, *zeros))

    def by_block(self, *shape: int, backward: bool) -> pl.BlockSpec:
        """Returns the spec of (batch, heads, blocks, *shape), with an entry for each grid step."""
        step, zeros = self._step(backward), (0,) * len(shape)
        return pl.BlockSpec((1, self.heads, 1, *shape), lambda b, h, i: (b, h, step(i), *zeros))

    def _step(self, backward: bool):
        last = self.blocks - 1
        return (lambda i: last - i) if backward else (lambda i: i)


def padded_size(size: int) -> int:
    """Returns a head's padded features: a power of two, so that whole heads fill registers, or whole registers."""
    if size >= _LANES:
        return -(-size // _LANES) * _LANES
    return max(ROWS, 1 << (size - 1).bit_length())


def heads_together(heads: int, features: int, value_dim: int) -> int:
    """Returns the key heads in a grid step."""
    together = max(1, _LANES // min(features, value_dim))
    return together if heads % together == 0 else heads


def recurrent_bytes(call: RecurrentCall) -> int:
    """Returns the VMEM of a step of the backward pass: double-buffered float32 blocks, and what is in flight."""
    units = call.heads * call.chunks
    sizes = call.features * (1 + call.by_feature) + call.value_dim
    width = call.heads * (call.group * (call.features + call.value_dim) + sizes)
    blocks = 2 * 4 * call.tokens * 2 * (width + 2 * ROWS * call.heads)
    states = 4 * call.features * call.value_dim * (units + 6 * call.heads)
    flight = 4 * CHUNK * CHUNK * units * (4 * call.group + (14 if "beta" in call.numbers else 4))
    if call.by_feature:
        flight += 4 * CHUNK * call.features * units * 18  # the decays of the levels, and of their gradients
    # The compiler keeps more alive than the program needs at any time: up to 2.2 times as much was measured.
    return (blocks + states + flight) * 9 // 4


def plan_recurrent(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    *,
    numbers: tuple[str, ...],
    by_feature: bool,
    totals: bool,
    weighs: bool,
    segments: bool,
    chip: str | None,
) -> RecurrentCall:
    """Returns the part of a call that shapes and dtypes determine.

    Raises:
      ValueError, NotImplementedError: the kernels do not support the arrays.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"TPU kernels compute in float32 or bfloat16, got {name} of {x.dtype}")
        if x.shape[3] > MAX_HEAD_DIM:
            raise NotImplementedError(
                f"TPU kernels support up to {MAX_HEAD_DIM} features of a head, got {name} with {x.shape[3]}"
            )
    features, value_dim = padded_size(key.shape[3]), padded_size(value.shape[3])
    group, count = query.shape[2] // key.shape[2], -(-key.shape[1] // CHUNK)
    heads = heads_together(key.shape[2], features, value_dim)
    chip = resolve_chip(chip, query)

    def of(chunks: int) -> RecurrentCall:
        blocks = -(-count // chunks)
        sizes = (heads, group, features, value_dim, chunks, blocks)
        return RecurrentCall(*sizes, numbers, by_feature, totals, weighs, segments, None)

    chunks = 4
    while chunks > 1 and (
        chunks > count or chunks * heads * group > 8 or recurrent_bytes(of(chunks)) > vmem_mib(chip) * MIB
    ):
        chunks //= 2
    call = of(chunks)
    limit = vmem_limit("recurrence", recurrent_bytes(call), chip, "use fewer query heads for a key head")
    return dataclasses.replace(call, vmem_limit=limit)
