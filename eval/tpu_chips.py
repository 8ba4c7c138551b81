"""What TPU chips have, for bounds on what a program can reach: Google Cloud's system architecture pages."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip, as the devices of a topology show it.

    Attributes:
      hbm: bytes of memory of a device.
      flops: bfloat16 operations a second. memory_bandwidth: bytes a second between HBM and the device.
      link_bandwidth: bytes a second that a device can receive from its neighbours over all links at once.
      topologies: the shapes a slice can have.
    """

    hbm: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    topologies: tuple[str, ...]


_GIB = 2.0**30
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

CHIPS: dict[str, Chip] = {
    "v4": Chip(32 * _GIB, 275e12, 1.2e12, 270e9, _CUBES),
    "v5e": Chip(16 * _GIB, 197e12, 0.82e12, 180e9, _PLANES),
    "v5p": Chip(95 * _GIB, 459e12, 2.77e12, 540e9, _CUBES),
    "v6e": Chip(32 * _GIB, 918e12, 1.64e12, 360e9, _PLANES),
    # Two devices a chip, each with half of what it has.
    "tpu7x": Chip(96 * _GIB, 1154e12, 3.69e12, 540e9, _CUBES),
}


def known_topologies() -> str:
    """All of them, in words."""
    return "; ".join(f"{name}: {', '.join(chip.topologies)}" for name, chip in CHIPS.items())
