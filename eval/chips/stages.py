"""Shows the progress of a command, and sends what its libraries print to a file."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

# Without a terminal, a line is printed when a stage begins and then at this interval.
SECONDS_BETWEEN_LINES = 15.0


@contextlib.contextmanager
def stages(name: str) -> Iterator[Callable[[str], None]]:
    """A context in which standard error shows progress, and what libraries write there goes to a file.

    On a terminal a line shows the current stage and its time; elsewhere a line is printed when a stage begins, and now
    and then while it lasts. An empty file is removed at the end.

    Args:
      name: a word in the file's name.

    Yields:
      A function that begins a stage, given its name.
    """
    number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    log = Path(path)
    sys.stderr.flush()
    shown = os.dup(2)
    ended, changed = threading.Event(), threading.Lock()
    current = ("", time.monotonic())
    with os.fdopen(os.dup(shown), "w") as file:
        console = Console(file=file, highlight=False, soft_wrap=True, markup=False)
        status = console.status("") if console.is_terminal else None

        def line() -> str:
            return f"{current[0]}: {time.monotonic() - current[1]:.0f} s"

        def begin(stage: str) -> None:
            nonlocal current
            with changed:
                if status is not None and current[0]:
                    console.print(line())
                current = stage, time.monotonic()
                if status is None:
                    console.print(stage)

        def show() -> None:
            while not ended.wait(0.5 if status is not None else SECONDS_BETWEEN_LINES):
                with changed:
                    if status is not None:
                        status.update(line())
                    elif current[0]:
                        console.print(line())

        thread = threading.Thread(target=show, daemon=True)
        console.print(f"messages of the compiler go to {log}")
        os.dup2(number, 2)
        try:
            with status or contextlib.nullcontext():
                thread.start()
                yield begin
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            os.close(number)
            ended.set()
            thread.join()
            if not log.stat().st_size:
                log.unlink()
