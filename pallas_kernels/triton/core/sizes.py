"""Sizes that several kernels have in common."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

#: Number of streaming multiprocessors that one wave of programs should fill (H100, H200; A100 has 108, B200 148).
MULTIPROCESSORS = 132

#: The kernels' numbers for the score functions.
SCORES = {"softmax": 0, "relu2": 1, "laplace": 2}


class PairTile(NamedTuple):
    """Queries and keys in a block, and Triton's warps and stages."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """Returns the next power of two, at least 16, as Triton's matrix products require."""
    return max(16, 1 << (size - 1).bit_length())


def split(length: int, others: int, block: int, resident: int = 1) -> tuple[int, int]:
    """Cuts a length into segments that, times `others` programs, fill the GPU once, with `resident` programs on a
    multiprocessor; returns their number and length."""
    segment = math.ceil(length / max(1, resident * MULTIPROCESSORS // others))
    segment = math.ceil(segment / block) * block
    return math.ceil(length / segment), segment


_Tiles = TypeVar("_Tiles", bound=tuple)
_ADJUST: contextvars.ContextVar[Callable[[str, tuple], tuple] | None] = contextvars.ContextVar(
    "adjust", default=None
)


@contextlib.contextmanager
def adjusted_tiles(adjust: Callable[[str, tuple], tuple]) -> Iterator[None]:
    """A context in which kernels are traced with the sizes adjust(operation, sizes), for tuning them.

    JAX keeps traces: call `jax.clear_caches()` first where the same call was traced with other sizes.
    """
    token = _ADJUST.set(adjust)
    try:
        yield
    finally:
        _ADJUST.reset(token)


def adjustable(operation: str) -> Callable[[Callable[..., _Tiles]], Callable[..., _Tiles]]:
    """Makes a function that chooses an operation's sizes heed `adjusted_tiles`."""

    def decorate(choose: Callable[..., _Tiles]) -> Callable[..., _Tiles]:
        @functools.wraps(choose)
        def chosen(*arguments: object) -> _Tiles:
            tiles, adjust = choose(*arguments), _ADJUST.get()
            return tiles if adjust is None else adjust(operation, tiles)  # type: ignore[return-value]

        return chosen

    return decorate
