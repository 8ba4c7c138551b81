"""Sizes that several kernels choose alike."""

from __future__ import annotations

import math

#: Streaming multiprocessors that a kernel's programs should fill once (H100, H200; A100 has 108, B200 148).
MULTIPROCESSORS = 132

#: How a score function is named inside the kernels.
SCORES = {"softmax": 0, "relu2": 1, "laplace": 2}


def padded(size: int) -> int:
    """The next power of two, at least 16: the sizes that Triton's matrix products take."""
    return max(16, 1 << (size - 1).bit_length())


def split(length: int, others: int, block: int) -> tuple[int, int]:
    """Cuts a length so that its stretches, times `others` programs, fill the GPU once: their number and length."""
    stretch = math.ceil(length / max(1, MULTIPROCESSORS // others))
    stretch = math.ceil(stretch / block) * block
    return math.ceil(length / stretch), stretch
