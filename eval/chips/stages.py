"""Shows the progress of a command, and sends what its libraries print to a file."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def stages(name: str) -> Iterator[Callable[[str], None]]:
    """A context in which standard error shows progress, and what libraries write there goes to a file, which has this
    name in its own. It yields a function that begins a stage, given the stage's name.

    On a terminal there is a line for each stage and its time; elsewhere a line is printed when a stage begins.
    """
    number, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log")
    sys.stderr.flush()
    shown = os.dup(2)
    with os.fdopen(os.dup(shown), "w") as file:
        console = Console(file=file, highlight=False, soft_wrap=True, markup=False)
        console.print(f"messages of the compiler go to {path}")
        progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=console, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

        def begin(stage: str) -> None:
            for task in progress.task_ids:
                progress.stop_task(task)
            progress.add_task(stage)
            if not console.is_terminal:
                console.print(stage)

        os.dup2(number, 2)
        try:
            with progress if console.is_terminal else contextlib.nullcontext():
                yield begin
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            os.close(number)
            if not os.path.getsize(path):
                Path(path).unlink()
