"""TPU kernels in Pallas: arrays in, arrays out, differentiable, forward and backward."""

from pallas_kernels.tpu.block.api import block_attention
from pallas_kernels.tpu.block.plan import Granules
from pallas_kernels.tpu.compress.api import compress, compress_blocks
from pallas_kernels.tpu.core.sizes import WindowBlocks, chip_name
from pallas_kernels.tpu.propagate.api import propagate
from pallas_kernels.tpu.window.api import window_attention, window_fits

__all__ = [
    "Granules",
    "WindowBlocks",
    "block_attention",
    "chip_name",
    "compress",
    "compress_blocks",
    "propagate",
    "window_attention",
    "window_fits",
]
