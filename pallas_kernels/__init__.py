"""Attention kernels for TPUs (Pallas) and NVIDIA GPUs (Triton): arrays in, arrays out.

`pallas_kernels.tpu` and `pallas_kernels.triton` are imported when they are first used, because Pallas and Triton load
slowly, and because users choose Triton's interpreter before it is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels import tpu as tpu
    from pallas_kernels import triton as triton


def __getattr__(name: str) -> Any:
    if name in ("tpu", "triton"):
        return importlib.import_module(f"pallas_kernels.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
