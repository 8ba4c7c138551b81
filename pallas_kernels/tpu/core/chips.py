"""TPU chips: their names, their vector memory (VMEM), and the check that a kernel's blocks fit in it."""

from __future__ import annotations

import jax
from jaxtyping import Array

MIB = 1 << 20

#: VMEM of one core in MiB. Chips that are not listed count as having the smallest VMEM of all.
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}
SMALLEST_VMEM_MIB = 16
#: VMEM in MiB that the compiler grants a kernel that requests no limit.
GRANTED_MIB = 16


def chip_name(device_kind: str) -> str | None:
    """Returns `VMEM_MIB`'s name for a `jax.Device.device_kind` ("TPU v5 lite", ...); None for other devices."""
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


def resolve_chip(chip: str | None, x: Array | jax.ShapeDtypeStruct) -> str | None:
    """Returns the chip to choose block sizes for.

    It is the requested chip, otherwise the chip of x's mesh, of the mesh in use, or of this process. None if none of
    these determines it.

    Raises:
      ValueError: the chip is not in `VMEM_MIB`.
    """
    if chip is not None and chip not in VMEM_MIB:
        raise ValueError(f"chip must be None or one of {sorted(VMEM_MIB)}, got {chip!r}")
    for mesh in (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if chip is None and mesh.abstract_device is not None:
            chip = chip_name(mesh.abstract_device.device_kind)
    if chip is None and jax.default_backend() == "tpu":
        chip = chip_name(jax.devices()[0].device_kind)
    return chip


def vmem_mib(chip: str | None) -> int:
    """Returns the VMEM of one core of a chip in MiB; for None, the smallest chip's."""
    return VMEM_MIB.get(chip or "", SMALLEST_VMEM_MIB)


def vmem_limit(kernel: str, needed: int, chip: str | None, advice: str) -> int | None:
    """Returns the VMEM limit in bytes to request from the compiler for a kernel that needs `needed` bytes.

    None if the limit that every kernel is granted suffices.

    Raises:
      ValueError: the chip has less than `needed`; the message gives both numbers and the `advice`.
    """
    capacity = vmem_mib(chip) * MIB
    if needed > capacity:
        where = chip or "the smallest chip"
        raise ValueError(
            f"{kernel} needs {needed / MIB:.1f} MiB of VMEM, {where} has {capacity / MIB:.0f} MiB: {advice}"
        )
    return None if needed <= GRANTED_MIB * MIB else needed
