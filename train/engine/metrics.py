"""What a run reports: metrics.jsonl, TensorBoard events, and a progress bar or plain lines."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from etils import epath
from rich import filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from brl_jax.json_files import parse_json
from train.engine.errors import UserError, reason
from train.engine.hosts import is_lead
from train.engine.storage import Mirror, as_os_errors, is_remote, user_cache, write_whole
from train.engine.trackers import TensorboardLog, WandbLog

T = TypeVar("T")

# Without a terminal, a line is printed at the first step and then this often.
_SECONDS_BETWEEN_LINES = 10.0


# soft_wrap: the terminal breaks long lines.
_CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)


def as_started(text: str) -> str:
    """A text whose commands run where this one was started: `brl-train lm` instead of `python -m train.lm`, which only
    a checkout's folder has."""
    if Path(sys.argv[0]).name not in ("brl-train", "brl-eval"):
        return text
    return re.sub(r"python -m (train|eval)\.(\w+)", r"brl-\1 \2", text)


def announce(message: str) -> None:
    """Prints a line on stderr if that is a terminal, whose user waits while the data and the network are made.
    Elsewhere a command that fails prints the error alone."""
    if _CONSOLE.is_terminal:
        _CONSOLE.print(message, markup=False)


def log(message: str) -> None:
    """Prints a line on stderr, above the progress bar if there is one; of several processes only the first prints."""
    if is_lead():
        _CONSOLE.print(as_started(message), markup=False)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context in which nothing is logged."""
    before, _CONSOLE.quiet = _CONSOLE.quiet, True
    try:
        yield
    finally:
        _CONSOLE.quiet = before


def tracked(
    pieces: Iterable[tuple[T, int]], total: int | None, title: str, *, in_bytes: bool = False
) -> Generator[T, None, None]:
    """Yields pieces as they are made and shows the progress on stderr: a bar on a terminal, otherwise a line now and
    then.

    Args:
      pieces: each with its size. total: of the sizes, if it is known. title: what is made. in_bytes: whether sizes are
        bytes.
    """
    began = last_line = time.monotonic()
    done, shown = 0, filesize.decimal if in_bytes else "{:,}".format
    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    hidden = not (_CONSOLE.is_terminal and is_lead())
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=_CONSOLE, transient=True, disable=hidden) as progress:
        task = progress.add_task(title, total=total)
        for piece, size in pieces:
            done += size
            progress.update(task, completed=done)
            now = time.monotonic()
            if hidden and now - last_line >= _SECONDS_BETWEEN_LINES:
                last_line = now
                seconds = (now - began) / done * max((total or 0) - done, 0)
                log(
                    f"{title}: {shown(done)}"
                    + (f" of {shown(total)}  {clock(seconds)} left" if total else "")
                )
            yield piece


class MetricsLog:
    """metrics.jsonl, one JSON object a line and one line a step, and TensorBoard events.
    A run that resumes after step s first drops the lines after s, so that no step appears twice. Only the first
    process writes. In object storage the files are copies of local files (`storage.Mirror`).

    Args:
      last_step: the last step whose line stays; -1 starts an empty file.
      wandb_config: sends the metrics to Weights & Biases, with this configuration.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        *,
        last_step: int,
        tensorboard: bool,
        wandb_config: Mapping[str, Any] | None = None,
    ):
        self._file = self._mirror = None
        self._trackers: list[TensorboardLog | WandbLog] = []
        if not is_lead():
            return
        folder = Path(workdir)
        if wandb_config is not None:
            where = user_cache() if is_remote(workdir) else folder
            self._trackers.append(WandbLog(os.fspath(workdir), where, wandb_config))
        written = [epath.Path(workdir) / "metrics.jsonl"]
        if is_remote(workdir):
            self._mirror = Mirror(epath.Path(workdir), log)
            folder = self._mirror.folder
            written.append(epath.Path(folder / "metrics.jsonl"))  # what the last process could not upload
        path = folder / "metrics.jsonl"
        with as_os_errors():
            kept = [
                [(line, values["step"]) for line, values in _whole_lines(each) if values["step"] <= last_step]
                for each in written
            ]
        lines = max(kept, key=len)
        missing = last_step - len({step for _, step in lines if step > 0})
        if missing > 0:
            log(f"{path} has no line of {missing} of the {last_step} steps before; they stay missing")
        write_whole(epath.Path(path), "".join(f"{line}\n" for line, _ in lines))
        # Unbuffered and in append mode, each line is one write. The next start drops a line that a crash cut off.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        if tensorboard:
            self._trackers.append(TensorboardLog(folder, last_step))

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line; it must have "step", and finite numbers otherwise. Raises OSError if it cannot be written."""
        if self._file is None:
            return
        _write_all(self._file, (json.dumps(line, allow_nan=False) + "\n").encode())
        for tracker in self._trackers:
            tracker.write(line)

    def sync(self) -> bool:
        """Copies the files to object storage, if the run is there. Returns whether it has all of them."""
        if self._mirror is None:
            return True
        for tracker in self._trackers:
            tracker.flush()
        return self._mirror.sync()

    def close(self) -> None:
        """Closes the files, and copies them to object storage."""
        for each in (self._file, *self._trackers, self._mirror):
            if each is not None:
                each.close()


def _write_all(file: BinaryIO, content: bytes) -> None:
    """Writes to an unbuffered file. A disk that becomes full takes a part of the content without an error."""
    if file.write(content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def read_metrics(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without a line that a crash cut off."""
    path = epath.Path(workdir) / "metrics.jsonl"
    try:
        with as_os_errors():
            if not path.exists():
                raise UserError(f"--workdir: {path} is missing")
            return [values for _, values in _whole_lines(path)]
    except OSError as error:
        raise UserError(f"--workdir: {path} cannot be read: {reason(error)}") from error


def _whole_lines(path: epath.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a metrics.jsonl and what they hold, without those that a crash cut off."""
    if not path.exists():
        return
    for line in path.read_bytes().decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield line, parse_json(line, {"step": int})


class RunReport(Protocol):
    """A context manager that shows a run's progress."""

    def __enter__(self) -> RunReport: ...
    def __exit__(self, *exception: object) -> None: ...

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a finished step; `line` is its line in metrics.jsonl."""

    def busy(self, note: str) -> None:
        """Shows what the run does between steps."""


class Reporter:
    """A context manager that shows a run's progress: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, steps: int, start: int):
        self._steps = steps
        self._first: tuple[int, float] | None = None
        self._last_line = -math.inf
        self._progress: Progress | None = None
        if _CONSOLE.is_terminal and is_lead():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=_CONSOLE,
            )
            self._task = self._progress.add_task("training", total=steps, completed=start, note="compiling")

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a finished step; `line` is its line in metrics.jsonl."""
        step, rate = line["step"], line["tokens_per_second"]
        note = f"loss {line['loss']:.4f}  {_thousands(rate)} tokens/s"
        note += f"  MFU {line['mfu']:.1%}" if "mfu" in line else ""
        if "val_loss" in line:
            note += f"  held-out loss {line['val_loss']:.4f}"
            note += f", accuracy {line['val_accuracy']:.1%}" if "val_accuracy" in line else ""
        now = time.monotonic()
        self._first = self._first or (step, now)
        first, began = self._first
        if self._progress is not None:
            self._progress.update(self._task, completed=step, note=note)
            if "val_loss" in line:
                log(f"step {step}: {note}")
        elif "val_loss" in line or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            # The first step's time is its program's, which had to be compiled.
            left = (now - began) / (step - first) * (self._steps - step) if step > first else 0
            log(f"step {step}/{self._steps}  {note}{f'  {clock(left)} left' if left else ''}")

    def busy(self, note: str) -> None:
        """Shows what the run does between steps."""
        if self._progress is not None:
            self._progress.update(self._task, note=note)


def _thousands(rate: float) -> str:
    return f"{rate / 1000:.1f}k" if rate >= 1000 else f"{rate:.0f}"


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
