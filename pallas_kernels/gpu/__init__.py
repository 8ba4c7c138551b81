"""GPU kernels in Triton, reached through jax-triton: arrays in, arrays out, differentiable, forward and backward."""

from pallas_kernels.gpu.compress.api import compress, compress_obstacle
from pallas_kernels.gpu.core.bridge import (
    LEAST_CAPABILITY,
    check_interpretation,
    obstacle,
    target_capability,
)
from pallas_kernels.gpu.local.api import local_attention, local_obstacle
from pallas_kernels.gpu.local.lists import Pattern
from pallas_kernels.gpu.propagate.api import propagate, propagate_obstacle
from pallas_kernels.gpu.selected.api import selected_attention, selected_obstacle
from pallas_kernels.gpu.squared_relu.api import Ranges, squared_relu_attention, squared_relu_obstacle

__all__ = [
    "LEAST_CAPABILITY",
    "Pattern",
    "Ranges",
    "check_interpretation",
    "compress",
    "compress_obstacle",
    "local_attention",
    "local_obstacle",
    "obstacle",
    "propagate",
    "propagate_obstacle",
    "selected_attention",
    "selected_obstacle",
    "squared_relu_attention",
    "squared_relu_obstacle",
    "target_capability",
]
