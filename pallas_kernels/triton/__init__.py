"""GPU kernels in Triton, called through jax-triton: differentiable functions of arrays, forward and backward."""

from pallas_kernels.triton.compress.api import compress, compress_blocks, compress_unsupported
from pallas_kernels.triton.core.bridge import (
    LEAST_CAPABILITY,
    check_interpretation,
    target_capability,
    unsupported,
)
from pallas_kernels.triton.local.api import local_attention, local_unsupported
from pallas_kernels.triton.local.lists import Pattern
from pallas_kernels.triton.propagate.api import propagate, propagate_unsupported
from pallas_kernels.triton.recurrent.api import Operands, Sums, recurrence
from pallas_kernels.triton.recurrent.plan import recurrence_unsupported
from pallas_kernels.triton.selected.api import selected_attention, selected_unsupported
from pallas_kernels.triton.squared_relu.api import Ranges, squared_relu_attention, squared_relu_unsupported

__all__ = [
    "LEAST_CAPABILITY",
    "Operands",
    "Pattern",
    "Ranges",
    "Sums",
    "check_interpretation",
    "compress",
    "compress_blocks",
    "compress_unsupported",
    "local_attention",
    "local_unsupported",
    "propagate",
    "propagate_unsupported",
    "recurrence",
    "recurrence_unsupported",
    "selected_attention",
    "selected_unsupported",
    "squared_relu_attention",
    "squared_relu_unsupported",
    "target_capability",
    "unsupported",
]
