"""Launches of the block-sparse kernels: a grid over the listed pairs of blocks, which it reads from scalar memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu.block.plan import BlockCall, BlockSteps
from pallas_kernels.varying import result_like, vary_alike


class Hidden(NamedTuple):
    """What hides keys from queries: segment ids of both, and the first keys of the runs that queries choose."""

    segments: tuple[Int[Array, "B 1 T"], Int[Array, "B 1 S"]] | None
    chosen: Int[Array, "B tiles runs T"] | None


#: An array, and the kind of its rows: "q" queries, "k" keys, "s" statistics.
Operand = tuple[str, Array]

_ORDER: tuple[Literal["parallel", "arbitrary"], ...] = ("parallel", "parallel", "arbitrary", "arbitrary")


@dataclasses.dataclass(frozen=True)
class BlockLaunch:
    """One kernel over the listed pairs of a call.

    Attributes:
      kernel, name: the function, and its name for the compiler.
      call: everything static about the call.
      results: the kind of each result's rows: "q" queries, "k" keys, "s" two statistics, "r" one statistic; "d" is the
        gradient of a bias, "a" all queries in whole blocks, which the kernel itself copies to HBM.
      scratch: without a bias's; a shape is one of float32.
      by_key: whether the grid completes one block of keys after another instead of blocks of queries.
    """

    kernel: Callable[..., None]
    name: str
    call: BlockCall
    results: str
    scratch: Sequence[Any] = ()
    by_key: bool = False

    def run(
        self,
        operands: Sequence[Operand],
        hidden: Hidden,
        shift: Int[Array, "1"] | None,
        bias: Float[Array, "tiles rows lanes"] | None,
    ) -> Sequence[Array]:
        """Returns the results over all pairs; the first two operands are query and key."""
        pieces = [
            self._run_piece(steps, operands, hidden, shift, bias) for steps in self.call.pieces(self.by_key)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return [
            functools.reduce(jnp.add, parts)
            if kind == "d"
            else jnp.concatenate(parts, axis=1 if kind in "qk" else 3)
            for kind, parts in zip(self.results, zip(*pieces))
        ]

    def _run_piece(
        self, steps: BlockSteps, operands: Sequence[Operand], hidden: Hidden, shift, bias
    ) -> Sequence[Array]:
        call, layout, group = self.call, self.call.layout, self.call.layout.group
        query, key = operands[0][1], operands[1][1]
        batch, tiles = query.shape[0], query.shape[2] // layout.width
        grid: tuple[int, ...] = (batch, tiles, len(steps.own))
        if self.by_key:
            grid = (batch, tiles // group, len(steps.own), group)
        lists = [x for x in (steps.own, steps.other, steps.words) if x is not None]
        scalars = [*(jnp.asarray(x) for x in lists), *([] if shift is None else [shift])]
        given = [*operands, *zip("ij", hidden.segments or ())]
        given += [] if hidden.chosen is None else [("s", hidden.chosen)]
        scratch = [*self.scratch]
        if bias is not None:
            given.append(("b", bias))
            scratch.append(call.bias_array)
        own_block, own_length = (call.block_k, call.keys) if self.by_key else (call.block_q, call.queries)
        length = min(steps.stop * own_block, own_length) - steps.first * own_block
        rows = {"s": 2 * layout.packed, "r": layout.packed}
        shapes = {
            "q": ((batch, length, query.shape[2]), query.dtype),
            "k": ((batch, length, key.shape[2]), query.dtype),
            "s": ((batch, tiles, rows["s"], length), jnp.float32),
            "r": ((batch, tiles, rows["r"], length), jnp.float32),
            "a": ((batch, len(call.rows) * call.block_q, query.shape[2]), query.dtype),
            "d": ((batch, tiles, *bias.shape[1:]) if bias is not None else (), jnp.float32),
        }
        return pl.pallas_call(
            functools.partial(self.kernel, call=call, scalars=len(scalars)),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                grid=grid,
                in_specs=[self._spec(kind, x.shape[2], 0) for kind, x in given],
                out_specs=[
                    self._spec("s" if kind == "r" else kind, rows.get(kind), steps.first)
                    for kind in self.results
                ],
                scratch_shapes=[
                    pltpu.VMEM(shape, jnp.float32) if isinstance(shape, tuple) else shape for shape in scratch
                ],
            ),
            out_shape=[result_like(query, *shapes[kind]) for kind in self.results],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=_ORDER[: len(grid)], vmem_limit_bytes=call.vmem_limit
            ),
            interpret=call.interpret,
            name=self.name,
        )(*vary_alike(*scalars, *(x for _, x in given)))

    def _spec(self, kind: str, rows: int | None, first: int) -> pl.BlockSpec:
        """Returns the spec of an array that begins at block `first`. Further kinds are "i" and "j", ids of queries and
        keys, and "b" and "d", a bias and its gradient."""
        call, width, group = self.call, self.call.layout.width, self.call.layout.group
        if kind == "a":
            return pl.BlockSpec(memory_space=pl.ANY)

        def index(b, t, step, *refs):
            tile_q, tile_k = t, jax.lax.div(t, np.int32(group))
            if self.by_key:
                tile_q, tile_k, refs = t * group + refs[0], t, refs[1:]
            own, other = refs[0][step] - first, jnp.maximum(refs[1][step], 0)
            block_q, block_k = (other, own) if self.by_key else (own, other)
            return {
                "q": (b, block_q, tile_q),
                "k": (b, block_k, tile_k),
                "s": (b, tile_q, 0, block_q),
                "i": (b, 0, block_q),
                "j": (b, 0, block_k),
                "b": (tile_q, 0, 0),
                "d": (b, tile_k if self.by_key else tile_q, 0, 0),
            }[kind]

        sizes: dict[str, tuple] = {
            "q": (1, call.block_q, width),
            "k": (1, call.block_k, width),
            "s": (1, 1, rows, call.block_q),
            "i": (1, 1, call.block_q),
            "j": (1, 1, call.block_k),
        }
        if call.bias is not None:
            # By keys, the query tiles of a key tile take turns, and the kernel holds the gradients of all.
            tiles = group if self.by_key else 1
            sizes |= {"b": (1, *call.bias_operand), "d": (1, tiles, *call.bias_operand)}
        return pl.BlockSpec(sizes[kind], index)
