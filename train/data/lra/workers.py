"""Generators split in chunks, each with its own random stream, so that the number of processes changes nothing."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from train.engine.metrics import tracked

T = TypeVar("T")


def chunk_sizes(count: int, size: int) -> list[int]:
    """`count` examples in chunks of `size`, the last one smaller."""
    return [min(size, count - start) for start in range(0, count, size)]


def run_chunks(
    make: Callable[[int, int], T], sizes: Sequence[int], processes: int, title: str
) -> Iterator[T]:
    """make(index, size) for each chunk, in order, with progress on stderr.

    Args:
      make: can be pickled. processes: how many at a time; 0: one a core. title: what is made.
    """
    processes = min(processes or os.cpu_count() or 1, len(sizes))
    if processes <= 1:
        yield from tracked((make(index, size) for index, size in enumerate(sizes)), sizes, title)
        return
    # Not forked: this process may have threads (JAX's, the input's), which a fork would not copy.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from tracked(pool.map(make, range(len(sizes)), sizes), sizes, title)
