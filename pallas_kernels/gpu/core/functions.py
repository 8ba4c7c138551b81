"""Functions in Triton's language that several kernels call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh of float32, exact to the rounding of 1; Triton's own is one of a GPU's library and cannot be interpreted."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
