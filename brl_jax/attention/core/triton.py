"""The backends of Triton kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from brl_jax.attention.core.dispatch import Backend


def triton_backend(
    run: Callable[..., Any],
    unsupported: Callable[..., str | None],
    unsuited: bool = False,
    gradient: Callable[..., Any] | None = None,
) -> Backend:
    """The backend of a Triton kernel.

    Triton's interpreter is chosen for a whole process, by TRITON_INTERPRET=1. In such a process only a request by name
    takes the kernel: one who debugs a kernel of their own has not asked for these.

    Args:
      run: `run(*operands)`, the kernel; compiled or interpreted, as the process has chosen.
      unsupported, unsuited: those of `Backend`.
      gradient: likewise, without `interpret`.
    """

    def checked(*operands: Any, interpret: bool) -> Any:
        # Imported where it is needed: the kernels' modules cost import time.
        from pallas_kernels import triton

        triton.check_interpretation(interpret)
        return run(*operands)

    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    checked_gradient = None if gradient is None else lambda *given, interpret: gradient(*given)
    return Backend("triton", checked, unsupported, unsuited or interprets, checked_gradient)
