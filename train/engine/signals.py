"""SIGTERM and Ctrl-C while a run trains."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import jax


class Signals:
    """A context manager that records SIGTERM and Ctrl-C instead of ending the process; a second Ctrl-C ends it.

    With several processes it records nothing: `train.engine.hosts.preempted` tells all of them at the same step.

    Attributes:
      received: the signal's number, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ():
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: object) -> None:
        self.received = signum
        # The second Ctrl-C gets the system's own handler, which works in the middle of a long step.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The progress bar hides the cursor, and a second Ctrl-C would leave it hidden.
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(2, f"{show_cursor}\nfinishing the step and saving; Ctrl-C again stops at once\n".encode())
