"""Lower bounds for the work of a kernel, in cycles of one TPU core: the matrix units, and the memory.

They compare with the bundles of a schedule's grid steps; a bundle takes at least one cycle.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from eval.chips.tpu_chips import CHIPS, Chip
from pallas_kernels.tpu.core.heads import HeadLayout
from pallas_kernels.tpu.window.plan import WindowPlan
from pallas_kernels.tpu.window.sizes import plan_window

#: Matrix products of attention over all visible pairs: scores and output; in the backward pass scores, and the
#: gradients of weights, queries, keys and values.
_FORWARD, _BACKWARD = 2, 5


def _device(chip: str) -> Chip:
    return CHIPS["tpu7x" if chip == "7x" else chip]


def _pairs_a_cycle(chip: str) -> int:
    """How many pairs of bfloat16 numbers a core multiplies in a cycle: four matrix units take a row each, or two take
    two."""
    return 4 * _device(chip).matrix_unit ** 2


def matrix_cycles(chip: str, products: float) -> int:
    """Cycles in which the matrix units multiply so many pairs of bfloat16 numbers."""
    return math.ceil(products / _pairs_a_cycle(chip))


def memory_cycles(chip: str, moved: float) -> int:
    """Cycles, summed over the cores of a device, in which its memory moves so many bytes."""
    device = _device(chip)
    cycles_a_second = device.flops / (2 * _pairs_a_cycle(chip))
    return math.ceil(moved / device.memory_bandwidth * cycles_a_second)


def visible_products(length: int, window: int, heads: int, head_dim: int, *, backward: bool) -> int:
    """The products of all visible pairs, which causal attention over `window` keys cannot avoid."""
    window = min(window, length)
    pairs = window * length - window * (window - 1) // 2
    return pairs * heads * head_dim * (_FORWARD + (_BACKWARD if backward else 0))


def tiled_products(
    chip: str, length: int, window: int, heads: int, head_dim: int, any_chip: bool, *, backward: bool
) -> int:
    """The products that the matrix units perform for the tiles of the window kernels.

    Tiles at the edges of a window are computed whole, and a depth or width that does not fill a matrix unit takes as
    long as one that does.
    """
    x = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)
    call = plan_window(x, x, x, left=window - 1, right=0, chip=None if any_chip else chip, blocks=None)
    size, tiles = _device(chip).matrix_unit, -(-heads // call.layout.packed)
    total = _of_pass(call.forward, call.layout, size, scores=1, transposed=1, plain=0)
    if backward:
        narrow = call.layout.packed > 1
        total += _of_pass(
            call.backward,
            call.layout,
            size,
            scores=2,
            transposed=3 if narrow else 1,
            plain=0 if narrow else 2,
        )
    return total * tiles


def _of_pass(
    plan: WindowPlan, layout: HeadLayout, size: int, *, scores: int, transposed: int, plain: int
) -> int:
    """Products of one pass over one tile of heads.

    `scores` products have the lanes of a tile as depth and its queries as columns; `transposed` ones a row for each
    lane of a head, and columns of queries or keys; `plain` ones the lanes of a tile as columns.
    """

    def whole(count: int) -> int:
        return -(-count // size) * size

    keys = plan.tile * len(plan.distances())
    each = (
        scores * keys * whole(layout.width) * whole(plan.tile)
        + transposed * layout.head_dim * whole(keys) * whole(plan.tile)
        + plain * plan.tile * whole(keys) * whole(layout.width)
    )
    return each * plan.blocks * plan.tiles * layout.packed
