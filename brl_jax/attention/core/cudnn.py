"""Whether a program can use cuDNN's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def cudnn_unsupported(with_cudnn: Callable[..., Any], *arguments: Any) -> str | None:
    """Why a function that calls cuDNN cannot be compiled for the target GPU, or None."""
    from pallas_kernels import triton

    capability = triton.target_capability()
    if capability < triton.LEAST_CAPABILITY:
        return f"the GPU must have compute capability 8.0 or more, got {capability / 10}"
    # JAX refuses to trace the call, on any platform, if cuDNN is missing or its version does not support the call.
    try:
        jax.eval_shape(with_cudnn, *arguments)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"cuDNN: {error}"
    return None
