"""Block sizes by chip and shape, and the check that a kernel's blocks fit in vector memory (VMEM).

The sizes were chosen by the compiler's instruction schedules (`python -m eval.tpu_schedule`), not by timing.
"""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array

from pallas_kernels.tpu.core.heads import Layout
from pallas_kernels.tpu.window.plan import WindowPlan
from pallas_kernels.tpu.window.sums import held_rows

MIB = 1 << 20

#: VMEM of one core in MiB; chips that are not listed are taken to have what every chip has.
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}
SMALLEST_VMEM_MIB = 16
#: What the compiler grants a kernel that asks for nothing.
GRANTED_MIB = 16
#: Pairs of tiles in one unrolled step: beyond this the program, not its data, grows too large.
MAX_UNROLLED = 96

#: Pairs of blocks that one launch of block_attention lists in scalar memory (1 MiB, two numbers a pair, half of it
#: left free).
MAX_PAIRS = 1 << 16

#: Compressed tokens that compress and propagate hold in VMEM.
MAX_COMPRESSED = 1024

#: Tiles of the window kernels: wide matrix units want wide ones, narrow units waste less on narrow ones.
_WINDOW_TILES = {"v6e": 256, "7x": 256}
_DEFAULT_TILE = 128
_WINDOW_BLOCKS = {"v6e": 2048, "7x": 2048}
_DEFAULT_BLOCK = 1024


def chip_name(device_kind: str) -> str | None:
    """The table's name for `jax.Device.device_kind` ("TPU v5 lite", ...); None for a chip not in it."""
    names = {
        "TPU v4": "v4",
        "TPU v5": "v5p",
        "TPU v5p": "v5p",
        "TPU v5 lite": "v5e",
        "TPU v5e": "v5e",
        "TPU v6 lite": "v6e",
        "TPU v6e": "v6e",
        "TPU7x": "7x",
    }
    return names.get(device_kind)


def resolve_chip(chip: str | None, x: Array) -> str | None:
    """The chip asked for, else that of the mesh that x lies on, of the mesh in use or of this process; None where
    nothing says it.

    Raises:
      ValueError: for a chip that the tables do not hold.
    """
    if chip is not None and chip not in VMEM_MIB:
        raise ValueError(f"chip must be None or one of {sorted(VMEM_MIB)}, got {chip!r}")
    for mesh in (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if chip is None and mesh.abstract_device is not None:
            chip = chip_name(mesh.abstract_device.device_kind)
    if chip is None and jax.default_backend() == "tpu":
        chip = chip_name(jax.devices()[0].device_kind)
    return chip


def _vmem_mib(chip: str | None) -> int:
    return VMEM_MIB.get(chip or "", SMALLEST_VMEM_MIB)


def vmem_limit(kernel: str, needed: int, chip: str | None, advice: str) -> int | None:
    """What to ask of the compiler for a kernel that needs so many bytes: None where the usual grant is
    enough.

    Raises:
      ValueError: when the chip has less than that, with both numbers and what to change.
    """
    capacity = _vmem_mib(chip) * MIB
    if needed > capacity:
        where = chip or "a chip that was not named (pass chip=)"
        raise ValueError(
            f"{kernel} needs {needed / MIB:.1f} MiB of VMEM, {where} has {capacity / MIB:.0f} MiB: {advice}"
        )
    return None if needed <= GRANTED_MIB * MIB else needed


@dataclasses.dataclass(frozen=True)
class WindowBlocks:
    """Queries in a tile (one softmax) and in a grid step of the window kernels, forward and backward.

    Attributes:
      tile, block: multiples of 128, the block a multiple of the tile and no smaller than a side of the
        window.
      backward_tile, backward_block: the same for the backward pass.
    """

    tile: int
    block: int
    backward_tile: int
    backward_block: int

    def __post_init__(self) -> None:
        for name in ("tile", "block", "backward_tile", "backward_block"):
            size = getattr(self, name)
            if size < 128 or size % 128:
                raise ValueError(f"{name} must be a positive multiple of 128, got {size}")


def window_bytes(plan: WindowPlan, layout: Layout, itemsize: int, *, backward: bool) -> int:
    """VMEM of a step of the window kernels: double-buffered blocks, scratch and the scores in flight.

    Products of float32 are made of several of bfloat16: the compiler keeps their parts for all packed heads, 20 to 33
    tiles a head and pair of tiles in the shapes that tests/pallas_kernels/tpu/test_compile.py compiles.
    """
    width, group = layout.width, layout.group
    row = width * itemsize
    keys = 2 * (plan.block + plan.halo * len(plan.sides[1:]))
    blocks = (5 if backward else 2) * plan.block + keys
    statistics = 2 * 8 * 4 * plan.block
    scratch = 2 * held_rows(plan, group) * width * 4 if backward else 0
    wide = itemsize == 4
    tiles = 8 + 26 * layout.packed if wide else 6 if backward else 4
    scores = tiles * len(plan.distances()) * plan.tile**2 * 4
    total = 2 * blocks * row + statistics + scratch + scores
    return total * 5 // 4 if wide else total


def window_blocks(
    left: int, right: int, length: int, layout: Layout, itemsize: int, chip: str | None
) -> WindowBlocks | None:
    """The table's sizes for a shape, halved until they fit: in what every kernel is granted, or where float32 needs
    more than that, in what the chip has.

    None when the window is so wide that no block that holds its sides fits.
    """
    wide = itemsize == 4
    room = _vmem_mib(chip) if wide else GRANTED_MIB

    def choose(backward: bool) -> tuple[int, int] | None:
        tile = _DEFAULT_TILE if wide else _WINDOW_TILES.get(chip or "", _DEFAULT_TILE)
        while tile > 128 and tile >= 2 * max(left, right, 64):
            tile //= 2
        block = _WINDOW_BLOCKS.get(chip or "", _DEFAULT_BLOCK)
        while block // 2 >= max(tile, length):
            block //= 2
        while True:
            smallest = -(-max(left, right, 1) // tile)
            smallest = tile * (1 << (smallest - 1).bit_length())
            block = max(block, smallest)
            plan = WindowPlan(left, right, length, tile, block)
            fits = window_bytes(plan, layout, itemsize, backward=backward) <= room * MIB * 3 // 4
            if fits and plan.unrolled <= MAX_UNROLLED:
                return tile, block
            if block // 2 >= smallest:
                block //= 2
            elif tile < 256 and not plan.unrolled <= MAX_UNROLLED:
                tile *= 2
            else:
                return None

    forward, backward = choose(False), choose(True)
    return None if forward is None or backward is None else WindowBlocks(*forward, *backward)


def propagate_bytes(block: int, tile: int, keys: int, width: int, itemsize: int) -> int:
    """VMEM of a backward step of propagate, the larger one: blocks twice, the scores in flight.

    Of float32 the compiler keeps those of all packed heads where there are many keys.
    """
    scores = 56 if itemsize == 4 and keys > 256 else 8
    return 2 * (3 * block * width * itemsize + keys * width * (2 * itemsize + 8)) + scores * keys * tile * 4


def propagate_blocks(length: int, keys: int, width: int, itemsize: int) -> tuple[int, int]:
    """(tile, block): queries in one product and in a grid step, halved until they fit in what every kernel
    is granted and the end of the sequence leaves less than an eighth of the work empty."""
    tile, block, most = 256 if keys <= 256 else 128, 4096, GRANTED_MIB * MIB * 3 // 4
    while block > tile and (
        8 * (-length % block) > length or propagate_bytes(block, tile, keys, width, itemsize) > most
    ):
        block //= 2
    return tile, block


def compress_bytes(block: int, queries: int, width: int, itemsize: int, sets: int, packed: int) -> int:
    """VMEM of a backward step of compress, the larger one: blocks twice, results, the scores in flight.

    Products of float32 are made of several of bfloat16: the compiler keeps their parts for all packed heads.
    """
    history = (2 * sets + 2) * block * width * itemsize
    resident = queries * width * (itemsize * (1 + sets) + 4 * (1 + sets)) + 8 * 4 * packed * sets * queries
    scores = 28 * sets if itemsize == 4 else 6
    return 2 * (history + resident) + scores * block * queries * 4


def compress_block(length: int, queries: int, width: int, itemsize: int, sets: int, packed: int) -> int:
    """Tokens in a grid step, halved until they fit in what every kernel is granted."""
    block, most = 1024, GRANTED_MIB * MIB * 7 // 8
    while block > 128 and (
        block // 2 >= length or compress_bytes(block, queries, width, itemsize, sets, packed) > most
    ):
        block //= 2
    return block


def listed_pairs(words: int) -> int:
    """Pairs of blocks, each with so many words of bits, that one launch of block_attention lists in scalar memory."""
    return 2 * MAX_PAIRS // (2 + words)


def pair_bytes(block_q: int, block_k: int, width: int, itemsize: int) -> int:
    """VMEM of a backward step of block_attention, the larger one: blocks twice, sums, the scores in flight."""
    rows = (2 * block_q + 4 * block_k) * width * itemsize
    return 2 * rows + 2 * max(block_q, block_k) * width * 4 + 2 * 8 * 4 * block_q + 8 * block_k * 128 * 4
