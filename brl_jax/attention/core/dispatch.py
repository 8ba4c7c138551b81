"""How a call reaches the TPU kernels: which calls they serve, and the choice between them and XLA."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.checks import require

_LOG = logging.getLogger("brl_jax")


def dispatch(
    name: str,
    implementation: str | None,
    obstacle: str | None,
    kernel: Callable[..., Any],
    xla: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Runs one call of the function `name` on its TPU kernel or through XLA.

    Args:
      name: of the function, for messages.
      implementation: None takes the kernel when lowered for a TPU, if it serves the call, and XLA elsewhere; "pallas"
        the kernel everywhere, interpreted where there is no TPU; "xla" never.
      obstacle: why the kernel cannot serve this call; None if nothing is known to stand in the way.
      kernel: `kernel(*operands, interpret=...)`; may raise ValueError or NotImplementedError for what only it knows
        (sizes that don't fit in the chip's memory).
      xla: `xla(*operands)`.

    Raises:
      ValueError: on another implementation.
      NotImplementedError: if "pallas" was asked for and cannot be.
    """
    require(
        implementation in (None, "xla", "pallas"),
        f"implementation must be None, 'xla' or 'pallas', got {implementation!r}",
    )
    if implementation == "xla":
        return xla(*operands)
    run = functools.partial(kernel, interpret=False)
    if implementation == "pallas":
        if obstacle is not None:
            raise NotImplementedError(f"{name} with implementation='pallas': {obstacle}")
        return lax.platform_dependent(*operands, tpu=run, default=functools.partial(kernel, interpret=True))
    if obstacle is None:
        try:
            jax.eval_shape(run, *operands)
        except (ValueError, NotImplementedError) as error:
            obstacle = str(error)
    if obstacle is not None:
        _say_once(f"{name} runs through XLA, at linear cost, on a TPU too: {obstacle}")
        return xla(*operands)
    return lax.platform_dependent(*operands, tpu=run, default=xla)


def bias_obstacle(bias: Any) -> str | None:
    """Why the kernels, which add no bias, cannot serve a call with this one; None if there is none."""
    if bias is None:
        return None
    return f"bias must be None, got {type(bias).__name__ if isinstance(bias, PositionBias) else 'an array'}"


@functools.cache
def _say_once(message: str) -> None:
    _LOG.info(message)
