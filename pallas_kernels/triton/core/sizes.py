"""Sizes that several kernels have in common."""

from __future__ import annotations

import math

#: Number of streaming multiprocessors that one wave of programs should fill (H100, H200; A100 has 108, B200 148).
MULTIPROCESSORS = 132

#: The kernels' numbers for the score functions.
SCORES = {"softmax": 0, "relu2": 1, "laplace": 2}


def padded(size: int) -> int:
    """Returns the next power of two, at least 16, as Triton's matrix products require."""
    return max(16, 1 << (size - 1).bit_length())


def split(length: int, others: int, block: int) -> tuple[int, int]:
    """Cuts a length into segments that, times `others` programs, fill the GPU once; returns their number and length."""
    stretch = math.ceil(length / max(1, MULTIPROCESSORS // others))
    stretch = math.ceil(stretch / block) * block
    return math.ceil(length / stretch), stretch
