"""Generators split in chunks, each with its own random stream, so that the number of processes changes nothing."""

from __future__ import annotations

import collections
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from train.data.splits import SPLITS
from train.data.worker_pool import worker_pool
from train.engine.metrics import tracked

T = TypeVar("T")


def in_processes(
    make: Callable[[int, int, int], T], sizes: Mapping[str, int], chunk: int, processes: int, title: str
) -> dict[str, Callable[[], Iterator[T]]]:
    """What reads the chunks of each split of a generated set, with progress on stderr.

    Args:
      make: makes a chunk from the number of its split, its own number and its number of examples; can be pickled.
      sizes: examples of each split. chunk: of each chunk but the last. processes: how many at a time; 0: one a core.
      title: what is made.
    """
    return {
        split: functools.partial(
            _run,
            functools.partial(make, number),
            [min(chunk, sizes[split] - start) for start in range(0, sizes[split], chunk)],
            processes,
            f"{title}, {split}",
        )
        for number, split in enumerate(SPLITS)
    }


def _run(make: Callable[[int, int], T], sizes: Sequence[int], processes: int, title: str) -> Iterator[T]:
    processes = min(processes or os.cpu_count() or 1, len(sizes))
    if processes <= 1:
        yield from tracked(zip(map(make, itertools.count(), sizes), sizes), sum(sizes), title)
        return
    with worker_pool(processes) as submit:
        made = collections.deque(submit(make, number, size) for number, size in enumerate(sizes))
        chunks = (made.popleft().result() for _ in sizes)
        yield from tracked(zip(chunks, sizes), sum(sizes), title)
