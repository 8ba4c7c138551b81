"""Converts position biases to the form that the TPU kernels take: a number for each distance."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

import pallas_kernels as kernels
from brl_jax.attention.core.biases import ALiBi, DistanceBias
from brl_jax.attention.core.checks import require


class Distances(NamedTuple):
    """The range of distances in a launch, query position minus key position, in steps.

    Attributes:
      least, most: the bounds for all visible pairs.
      step: the distance between the original positions of two adjacent tokens in the kernel.
    """

    least: int
    most: int
    step: int = 1

    def within(self, bias: DistanceBias) -> tuple[int, int]:
        """The first distance that needs its own number, and how many distances do."""
        least, most = self.least, self.most
        if bias.farthest is not None:
            far = -(-bias.farthest // self.step)
            least, most = max(least, -far), min(most, far)
        return least, max(most - least, 0) + 1


def unsupported(bias: Any) -> str | None:
    """Why the kernels do not support a bias, or None."""
    if bias is None or isinstance(bias, DistanceBias):
        return None
    given = type(bias).__name__ if callable(bias) else "an array"
    return f"bias must be None or depend on the distance alone (`DistanceBias`), got {given}"


def described(bias: Any, distances: Distances) -> kernels.tpu.RelativeBias | None:
    """The bias as `tpu.window_unsupported` and `tpu.block_unsupported` take it."""
    if bias is None:
        return None
    if isinstance(bias, ALiBi):
        return kernels.tpu.RelativeBias(0)
    first, count = distances.within(bias)
    return kernels.tpu.RelativeBias(count, first)


def for_kernel(
    bias: Any, heads: int, distances: Distances
) -> kernels.tpu.Slopes | kernels.tpu.DistanceTable | None:
    """The bias as `tpu.window_attention` and `tpu.block_attention` take it; differentiable."""
    if bias is None:
        return None
    if isinstance(bias, ALiBi):
        slopes = bias.checked_slopes()
        _check_shape(slopes.shape, (heads,))
        return kernels.tpu.Slopes(slopes * distances.step)
    first, count = distances.within(bias)
    numbers = bias.by_distance((first + jnp.arange(count, dtype=jnp.int32)) * distances.step)
    _check_shape(numbers.shape, (heads, count))
    return kernels.tpu.DistanceTable(numbers, first)


def _check_shape(got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    require(
        got == expected,
        f"bias must have numbers for {expected[0]} heads: it must give shape {expected}, got {got}",
    )
