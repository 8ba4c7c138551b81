"""Block sizes of the window kernels by chip and shape, their VMEM, and the plan of a call.

The sizes were chosen by the compiler's instruction schedules (`python -m eval.tpu_schedule`), not by timing.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.tpu.core.chips import GRANTED_MIB, MIB, resolve_chip, vmem_limit, vmem_mib
from pallas_kernels.tpu.core.distances import RelativeBias
from pallas_kernels.tpu.core.heads import HeadLayout, layout_of
from pallas_kernels.tpu.core.inputs import Shaped, check_attention, check_multiple_of_128
from pallas_kernels.tpu.window.bias import bias_bytes
from pallas_kernels.tpu.window.key_gradient_sums import scratch_rows
from pallas_kernels.tpu.window.plan import WindowCall, WindowPlan

#: Pairs of tiles in one unrolled step; beyond this number the program, not its data, grows too large.
MAX_UNROLLED = 96

#: Tile sizes: wide matrix units need wide tiles, while narrow units waste less on narrow ones.
_TILES = {"v6e": 256, "7x": 256}
_DEFAULT_TILE = 128
_BLOCKS = {"v6e": 2048, "7x": 2048}
_DEFAULT_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class WindowBlocks:
    """Queries in a tile (one softmax) and in a grid step of the window kernels, forward and backward.

    Attributes:
      tile, block: multiples of 128; the block is a multiple of the tile and at least as long as a side of the window.
      backward_tile, backward_block: the same for the backward pass.
    """

    tile: int
    block: int
    backward_tile: int
    backward_block: int

    def __post_init__(self) -> None:
        check_multiple_of_128(**dataclasses.asdict(self))


def window_bytes(plan: WindowPlan, layout: HeadLayout, itemsize: int, *, backward: bool) -> int:
    """Returns the VMEM of a step of the window kernels without a bias: double-buffered blocks, scratch and the scores
    in flight.

    A float32 product consists of several bfloat16 products, whose parts the compiler keeps for all packed heads: 20 to
    33 tiles for each head and pair of tiles in the shapes that tests/pallas_kernels/tpu/test_compile.py compiles.
    """
    width, group = layout.width, layout.group
    row = width * itemsize
    keys = 2 * (plan.block + plan.halo * len(plan.sides[1:]))
    blocks = (5 if backward else 2) * plan.block + keys
    statistics = 2 * 8 * 4 * plan.block
    scratch = 2 * scratch_rows(plan, group) * width * 4 if backward else 0
    wide = itemsize == 4
    tiles = 8 + 26 * layout.packed if wide else 6 if backward else 4
    if backward and not wide and plan.tile == 128 and layout.packed > 1:
        # The compiler keeps small tiles of several heads in flight: 17 MiB for windows of 1,024.
        tiles *= 3
    scores = tiles * len(plan.distances()) * plan.tile**2 * 4
    total = 2 * blocks * row + statistics + scratch + scores
    return total * 5 // 4 if wide else total


def window_blocks(
    left: int,
    right: int,
    length: int,
    layout: HeadLayout,
    itemsize: int,
    chip: str | None,
    bias: RelativeBias | None,
) -> WindowBlocks | None:
    """Returns the chip's block sizes, halved until they fit. They must fit in the VMEM that every kernel is granted or,
    if none do, in twice that (if the chip has it). Float32 needs more and may use the chip's whole VMEM. A bias comes
    on top, if the chip has enough.

    None if the window is so wide that no block that holds its sides fits.
    """
    wide = itemsize == 4

    def choose(backward: bool, room: int) -> tuple[int, int] | None:
        tile = _DEFAULT_TILE if wide else _TILES.get(chip or "", _DEFAULT_TILE)
        while tile > 128 and tile >= 2 * max(left, right, 64):
            tile //= 2
        block = _BLOCKS.get(chip or "", _DEFAULT_BLOCK)
        if not (backward or wide):
            # Filling and draining the software pipeline takes a sixth of a forward step of this size, in which the
            # matrix units idle. A step of twice the size is better unless its program grows too large.
            distances = 1 + -(-left // tile) + -(-right // tile)
            if 2 * block // tile * distances * layout.packed <= MAX_UNROLLED:
                block *= 2
        while block // 2 >= max(tile, length):
            block //= 2
        while True:
            smallest = -(-max(left, right, 1) // tile)
            smallest = tile * (1 << (smallest - 1).bit_length())
            block = max(block, smallest)
            plan = WindowPlan(left, right, length, tile, block)
            needed = window_bytes(plan, layout, itemsize, backward=backward)
            both = needed + bias_bytes(plan, layout, bias, backward=backward)
            fits = needed <= room * MIB * 3 // 4 and both <= vmem_mib(chip) * MIB * 3 // 4
            if fits and plan.unrolled <= MAX_UNROLLED:
                return tile, block
            if block // 2 >= smallest:
                block //= 2
            elif tile < 256 and not plan.unrolled <= MAX_UNROLLED:
                tile *= 2
            else:
                return None

    rooms = (vmem_mib(chip),) if wide else (GRANTED_MIB, min(2 * GRANTED_MIB, vmem_mib(chip)))
    forward, backward = (
        next(filter(None, (choose(backward, room) for room in rooms)), None) for backward in (False, True)
    )
    return None if forward is None or backward is None else WindowBlocks(*forward, *backward)


def plan_window(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    *,
    left: int,
    right: int,
    bias: RelativeBias | None = None,
    chip: str | None = None,
    blocks: WindowBlocks | None = None,
) -> WindowCall:
    """Returns the part of a call that shapes and dtypes determine; arguments as for `window_attention`.

    Raises:
      ValueError, NotImplementedError: as `window_attention`, for all errors in shapes and dtypes.
    """
    check_attention(query, key, value)
    chip = resolve_chip(chip, query)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"key must be as long as query ({query.shape[1]} tokens), got {key.shape[1]}")
    for name, side in (("left", left), ("right", right)):
        if not isinstance(side, (int, np.integer)) or isinstance(side, bool) or side < 0:
            raise ValueError(f"{name} must be an int of at least 0, got {side!r}")
    _, length, heads, head_dim = query.shape
    itemsize, layout = query.dtype.itemsize, layout_of(heads, key.shape[2], head_dim)
    # Clip the window to the sequence: keys beyond its ends would only cost tiles.
    left, right = min(int(left), length - 1), min(int(right), length - 1)
    if blocks is None:
        blocks = window_blocks(left, right, length, layout, itemsize, chip, bias)
    if blocks is None:
        raise ValueError(
            f"a window of {left} keys before and {right} after is too wide for the window kernel "
            f"(head width {layout.width}, {itemsize} bytes per number): use the block-sparse kernel"
        )
    forward = WindowPlan(left, right, length, blocks.tile, blocks.block)
    backward = WindowPlan(left, right, length, blocks.backward_tile, blocks.backward_block)

    def limit(plan: WindowPlan, backward: bool) -> int | None:
        added = bias_bytes(plan, layout, bias, backward=backward)
        needed = window_bytes(plan, layout, itemsize, backward=backward) + added
        name = "backward" if backward else "forward"
        advice = f"choose a block below {plan.block}"
        requested = vmem_limit(f"window_attention's {name} pass", needed, chip, advice)
        if requested is not None and itemsize < 4:
            # Packed heads keep more scores in flight than the estimate counts.
            requested = max(requested, 2 * GRANTED_MIB * MIB)
        if not added:
            return requested
        return min((requested or GRANTED_MIB * MIB) + added, vmem_mib(chip) * MIB)

    return WindowCall(forward, backward, limit(forward, False), limit(backward, True), layout, bias)
