"""Kills a worker that is stuck waiting for its peers, after a timeout and with a one-line message.

JAX's preemption service handles SIGTERM in C and only records it; training reads the record once a step. A process that
never reaches its next step, because a peer is stuck, would ignore the signal for ever. Python's own handlers do not run
either while the main thread waits inside a collective operation. Signals therefore go through a pipe to a thread, which
passes them on to JAX and looks at the clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

# From SIGTERM to the end of the process: time to finish the step and to write a checkpoint.
STOP_SECONDS = 300.0
# From Ctrl-C to the end of the process: nothing is saved.
INTERRUPT_SECONDS = 10.0
# From one step, batch of an evaluation or checkpoint to the next, compilation included.
IDLE_SECONDS = 1800.0


class Watchdog:
    """A thread that ends this process when it must not wait any longer.

    Before and after the training steps there is nothing to save, and SIGTERM ends the process at once, with exit
    status 143. During them (`watching`) the signal is passed on, so that all processes stop after the same step and
    save; after `STOP_SECONDS` the process ends without saving. A process that makes no step for `IDLE_SECONDS` ends
    with exit status 1.
    """

    def __init__(self, end: Callable[[str, int], None]):
        self._end = end
        self._forward: Callable[[int], None] = lambda signum: None
        self._last: float | None = None  # when the last step was made; None outside of `watching`
        self._stop: tuple[float, int, float] | None = None  # when to end, the signal, its time limit
        self._workdir = ""

    def start(self) -> None:
        """Takes SIGTERM from JAX's preemption service, which must be running. Call it from the main thread."""
        handlers = ctypes.CDLL(None).signal
        handlers.restype, handlers.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
        before = handlers(signal.SIGTERM, None)
        if before not in (None, 0, 1):  # SIG_DFL and SIG_IGN
            self._forward = ctypes.CFUNCTYPE(None, ctypes.c_int)(before)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def watching(self, workdir: str) -> Iterator[None]:
        """Watches the steps of the run in a folder: each of them must call `alive`."""
        self._workdir, self._last = workdir, time.monotonic()
        try:
            yield
        finally:
            self._last = None

    def alive(self) -> None:
        """Records that training goes on."""
        if self._last is not None:
            self._last = time.monotonic()

    def _watch(self, reader: int) -> None:
        while True:
            ready, _, _ = select.select([reader], [], [], 0.2)
            for signum in os.read(reader, 64) if ready else b"":
                self._receive(signum)
            now, last = time.monotonic(), self._last
            if self._stop is not None and now >= self._stop[0]:
                _, signum, seconds = self._stop
                self._end(
                    f"got {signal.Signals(signum).name} {seconds:.0f} seconds ago and still waits for the others; it "
                    f"ends{self._resume()}",
                    128 + signum,
                )
            if last is not None and now >= last + IDLE_SECONDS:
                self._end(f"has made no step for {IDLE_SECONDS:.0f} seconds; it ends{self._resume()}", 1)

    def _receive(self, signum: int) -> None:
        if signum == signal.SIGTERM:
            if self._last is None:
                self._end("got SIGTERM while it was not training, and ends", 128 + signum)
            self._forward(signum)
        if signum in (signal.SIGTERM, signal.SIGINT):
            seconds = STOP_SECONDS if signum == signal.SIGTERM else INTERRUPT_SECONDS
            stop = (time.monotonic() + seconds, signum, seconds)
            # Ctrl-C after SIGTERM shortens the time; repeating a signal does not extend it.
            self._stop = stop if self._stop is None else min(self._stop, stop)

    def _resume(self) -> str:
        started_again = f"; started again, all resume from the last checkpoint in {self._workdir}"
        return started_again if self._workdir else ""


def _end(reason: str, status: int) -> None:
    """Ends the process at once. An orderly exit would wait for the other processes."""
    print(f"process {jax.process_index()} of {jax.process_count()} {reason}", file=sys.stderr, flush=True)
    os._exit(status)


WATCHDOG = Watchdog(_end)
