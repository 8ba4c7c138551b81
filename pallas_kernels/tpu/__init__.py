"""TPU kernels in Pallas: differentiable functions of arrays, with forward and backward kernels.

Shapes and dtypes alone determine whether a kernel supports a call. For each function, `..._unsupported` returns the
reason why it does not.
"""

from pallas_kernels.tpu.block.api import block_attention, block_unsupported
from pallas_kernels.tpu.block.plan import Granules
from pallas_kernels.tpu.compress.api import (
    compress,
    compress_blocks,
    compress_blocks_unsupported,
    compress_unsupported,
)
from pallas_kernels.tpu.core.chips import chip_name
from pallas_kernels.tpu.core.distances import DistanceTable, RelativeBias, Slopes
from pallas_kernels.tpu.propagate.api import propagate, propagate_unsupported
from pallas_kernels.tpu.recurrent.api import Factors, Sums, recurrence, recurrence_unsupported
from pallas_kernels.tpu.recurrent.chunk import CHUNK
from pallas_kernels.tpu.window.api import window_attention, window_unsupported
from pallas_kernels.tpu.window.sizes import WindowBlocks

__all__ = [
    "CHUNK",
    "DistanceTable",
    "Factors",
    "Granules",
    "RelativeBias",
    "Slopes",
    "Sums",
    "WindowBlocks",
    "block_attention",
    "block_unsupported",
    "chip_name",
    "compress",
    "compress_blocks",
    "compress_blocks_unsupported",
    "compress_unsupported",
    "propagate",
    "propagate_unsupported",
    "recurrence",
    "recurrence_unsupported",
    "window_attention",
    "window_unsupported",
]
