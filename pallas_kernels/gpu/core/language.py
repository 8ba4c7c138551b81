"""Triton's language, and functions in it that several kernels call.

Where Triton is not installed, stand-ins take its place, so that kernels can be imported and read; see
`pallas_kernels.gpu.obstacle`.
"""

from __future__ import annotations

try:
    import triton.language as tl
    from triton import jit
except ImportError:
    from pallas_kernels.gpu.core import no_triton as tl  # type: ignore[no-redef]
    from pallas_kernels.gpu.core.no_triton import jit  # type: ignore[assignment]

__all__ = ["jit", "tanh", "tl"]


@jit
def tanh(x):
    """tanh of float32, exact to the rounding of 1: Triton's own functions are those of a GPU's library alone."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
