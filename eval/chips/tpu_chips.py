"""TPU chips: their memory and speed (Google Cloud's system architecture pages), and how to compile for them without
one."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
from typing import Any

from packaging.requirements import Requirement

from train.engine.errors import UserError
from train.engine.throughput import PEAK_FLOPS


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip, as the devices of a topology show it.

    Attributes:
      hbm: bytes of memory of a device.
      flops: bfloat16 operations per second.
      memory_bandwidth: bytes per second between HBM and the device.
      link_bandwidth: bytes per second that a device can receive from its neighbours over all links at once.
      matrix_unit: rows and columns of the weights in a matrix unit.
      topologies: the shapes that a slice can have.
    """

    hbm: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    matrix_unit: int
    topologies: tuple[str, ...]


_GIB = 2.0**30
_PLANES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

CHIPS: dict[str, Chip] = {
    "v4": Chip(32 * _GIB, PEAK_FLOPS["TPU v4"], 1.2e12, 270e9, 128, _CUBES),
    "v5e": Chip(16 * _GIB, PEAK_FLOPS["TPU v5e"], 0.82e12, 180e9, 128, _PLANES),
    "v5p": Chip(95 * _GIB, PEAK_FLOPS["TPU v5p"], 2.77e12, 540e9, 128, _CUBES),
    "v6e": Chip(32 * _GIB, PEAK_FLOPS["TPU v6e"], 1.64e12, 360e9, 256, _PLANES),
    # A chip has two devices, each with half of its memory and speed.
    "tpu7x": Chip(96 * _GIB, PEAK_FLOPS["TPU7x"], 3.69e12, 540e9, 256, _CUBES),
}


def known_topologies() -> str:
    """All topologies as a sentence for messages."""
    return "; ".join(f"{name}: {', '.join(chip.topologies)}" for name, chip in CHIPS.items())


#: The smallest topology of each chip, by the name that the kernels use for it.
SMALLEST_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "7x": "tpu7x:2x2x1",
}


def prepare_compiler() -> None:
    """Checks that the TPU compiler is installed and fits this JAX, and configures it for a host without a TPU.

    It then asks no metadata server, and other programs that compile need not wait.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu is not installed: pip install -e '.[tpu]'")
    for text in importlib.metadata.requires("jax") or ():
        needed = Requirement(text)
        if needed.name == "libtpu" and not needed.specifier.contains(
            found := importlib.metadata.version("libtpu")
        ):
            raise UserError(
                f"libtpu {found} does not fit this JAX, which requires it {needed.specifier}: pip install -e '.[tpu]'"
            )
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def described_devices(chip: str) -> list[Any]:
    """The devices of a chip's smallest topology. They need not exist: programs can be compiled for them, not run."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=SMALLEST_TOPOLOGIES[chip]).devices
