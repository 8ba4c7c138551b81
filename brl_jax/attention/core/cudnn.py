"""Whether cuDNN's attention can be part of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def cudnn_unsupported(with_cudnn: Callable[..., Any], *arguments: Any) -> str | None:
    """Why a function of cuDNN cannot be lowered for the GPU that is compiled for; None if it can."""
    from pallas_kernels import triton

    capability = triton.target_capability()
    if capability < triton.LEAST_CAPABILITY:
        return f"the GPU must have compute capability 8.0 or more, got {capability / 10}"
    # Without cuDNN, and for what its version does not know, JAX refuses to trace the call, whatever the platform.
    try:
        jax.eval_shape(with_cudnn, *arguments)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"cuDNN: {error}"
    return None
