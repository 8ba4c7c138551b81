"""TPU chips: their names, their vector memory (VMEM), and the check that a kernel's blocks fit in it."""

from __future__ import annotations

import jax
from jaxtyping import Array

MIB = 1 << 20

#: VMEM of one core in MiB. A chip that is not listed counts as having the smallest VMEM of all.
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}
SMALLEST_VMEM_MIB = 16
#: VMEM in MiB that the compiler grants a kernel which requests no limit of its own.
GRANTED_MIB = 16


def chip_name(device_kind: str) -> str | None:
    """The name that `VMEM_MIB` uses for a `jax.Device.device_kind` ("TPU v5 lite", ...); None for other devices."""
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
    """The chip to choose block sizes for.

    It is the requested chip, otherwise that of the mesh on which x lies, of the mesh in use, or of this process. The
    result is None where none of these determines it.

    Raises:
      ValueError: for a chip that is not in `VMEM_MIB`.
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
    """VMEM of one core of a chip in MiB; that of the smallest chip for None."""
    return VMEM_MIB.get(chip or "", SMALLEST_VMEM_MIB)


def vmem_limit(kernel: str, needed: int, chip: str | None, advice: str) -> int | None:
    """The VMEM limit in bytes to request from the compiler for a kernel that needs `needed` bytes.

    None where the limit that every kernel is granted suffices.

    Raises:
      ValueError: when the chip has less than `needed`; the message gives both numbers and the `advice`.
    """
    capacity = vmem_mib(chip) * MIB
    if needed > capacity:
        where = chip or "the smallest chip"
        raise ValueError(
            f"{kernel} needs {needed / MIB:.1f} MiB of VMEM, {where} has {capacity / MIB:.0f} MiB: {advice}"
        )
    return None if needed <= GRANTED_MIB * MIB else needed
