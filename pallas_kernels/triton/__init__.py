"""GPU kernels in Triton, called through jax-triton: differentiable functions of arrays, forward and backward."""

from pallas_kernels.triton.compress.api import compress, compress_obstacle
from pallas_kernels.triton.core.bridge import (
    LEAST_CAPABILITY,
    check_interpretation,
    obstacle,
    target_capability,
)
from pallas_kernels.triton.local.api import local_attention, local_obstacle
from pallas_kernels.triton.local.lists import Pattern
from pallas_kernels.triton.propagate.api import propagate, propagate_obstacle
from pallas_kernels.triton.recurrent.api import Operands, Sums, recurrence
from pallas_kernels.triton.recurrent.plan import recurrence_obstacle
from pallas_kernels.triton.selected.api import selected_attention, selected_obstacle
from pallas_kernels.triton.squared_relu.api import Ranges, squared_relu_attention, squared_relu_obstacle

__all__ = [
    "LEAST_CAPABILITY",
    "Operands",
    "Pattern",
    "Ranges",
    "Sums",
    "check_interpretation",
    "compress",
    "compress_obstacle",
    "local_attention",
    "local_obstacle",
    "obstacle",
    "propagate",
    "propagate_obstacle",
    "recurrence",
    "recurrence_obstacle",
    "selected_attention",
    "selected_obstacle",
    "squared_relu_attention",
    "squared_relu_obstacle",
    "target_capability",
]
