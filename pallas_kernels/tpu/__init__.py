"""TPU kernels in Pallas: arrays in, arrays out, differentiable, forward and backward."""

from pallas_kernels.tpu.block_attention import block_attention
from pallas_kernels.tpu.block_plan import Granules
from pallas_kernels.tpu.block_sizes import WindowBlocks, chip_name
from pallas_kernels.tpu.compress import compress, compress_blocks
from pallas_kernels.tpu.propagate import propagate
from pallas_kernels.tpu.window_attention import window_attention, window_fits

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
