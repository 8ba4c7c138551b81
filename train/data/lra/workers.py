"""Generators split in chunks, each with its own random stream, so that the number of processes changes nothing."""

from __future__ import annotations

import collections
import functools
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from train.data.splits import SPLITS
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
    others = set(multiprocessing.active_children())
    # Not forked: this process may have threads (JAX's, the input's), which a fork would not copy.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # Workers inherit this: a terminal sends Ctrl-C to all processes, and this one ends them without a traceback.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        made = collections.deque(pool.submit(make, number, size) for number, size in enumerate(sizes))
        signal.signal(signal.SIGINT, before)
        chunks = (made.popleft().result() for _ in sizes)
        try:
            yield from tracked(zip(chunks, sizes), sum(sizes), title)
        except BaseException:  # the pool would wait for all chunks
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
