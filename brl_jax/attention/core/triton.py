"""Backends that are Triton kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pallas_kernels as kernels
from brl_jax.attention.core.dispatch import Backend


def triton_backend(
    run: Callable[..., Any],
    unsupported: Callable[..., str | None],
    unsuited: bool = False,
    gradient: Callable[..., Any] | None = None,
) -> Backend:
    """The backend of a Triton kernel.

    TRITON_INTERPRET=1 switches a whole process to Triton's interpreter. In such a process only a request by name takes
    the kernel, because the user is probably debugging another one.

    Args:
      run: `run(*operands)` launches the kernel, compiled or interpreted as the process has chosen.
      unsupported, unsuited: as in `Backend`.
      gradient: as in `Backend`, without `interpret`.
    """

    def checked(*operands: Any, interpret: bool) -> Any:
        kernels.triton.check_interpretation(interpret)
        return run(*operands)

    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    checked_gradient = None if gradient is None else lambda *given, interpret: gradient(*given)
    return Backend("triton", checked, unsupported, unsuited or interprets, checked_gradient)
