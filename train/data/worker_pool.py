"""Processes that share a command's work and end with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any


@contextlib.contextmanager
def worker_pool(processes: int) -> Iterator[Callable[..., Future[Any]]]:
    """Yields the `submit` of a pool of processes. An error or a Ctrl-C in the body ends them at once, whatever was
    submitted."""
    others = set(multiprocessing.active_children())
    # Not forked: this process may have threads (JAX's, the input's), which a fork would not copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent) as pool:

        def submit(function: Callable[..., Any], *args: Any) -> Future[Any]:
            # This may start a worker, which inherits it: a terminal sends Ctrl-C to all processes, and this one ends
            # the workers without a traceback.
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                return pool.submit(function, *args)
            finally:
                signal.signal(signal.SIGINT, before)

        try:
            yield submit
        except BaseException:  # the pool would wait for all that was submitted
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def _end_with_parent() -> None:
    """Ends this worker when the command is killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
