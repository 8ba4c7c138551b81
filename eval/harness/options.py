"""Options that several commands share, each declared once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from brl_jax.fields import Checked
from train.cli.options import parse_options

O = TypeVar("O")  # noqa: E741


def command(
    options: O, name: str, about: str
) -> Callable[[Callable[[O], None]], Callable[[Sequence[str]], None]]:
    """Turns a function of options into the main function of `python -m NAME`; `about` is its line in --help."""

    def decorate(run: Callable[[O], None]) -> Callable[[Sequence[str]], None]:
        return lambda argv: run(parse_options(options, argv, prog=f"python -m {name}", about=about))

    return decorate


def check_names(options: Any, **known: Iterable[str]) -> None:
    """Raises ValueError if an option has a word that is not among the known ones."""
    for option, names in known.items():
        for word in getattr(options, option):
            if word not in names:
                raise ValueError(f"{option} must be out of {', '.join(names)}, got {word}")


@dataclasses.dataclass(frozen=True)
class OutputOptions(Checked):
    """How a command prints its results."""

    json: bool = False
    """Print JSON on a terminal too; into a file or a pipe it is always JSON."""


@dataclasses.dataclass(frozen=True)
class RunOptions(OutputOptions):
    """Which checkpoint of a run to read."""

    workdir: str | None = None
    """Folder of a run."""
    checkpoint: str = "best"
    """best (the best evaluation while training), last, or a step."""


@dataclasses.dataclass(frozen=True)
class EvalOptions(RunOptions):
    """What to measure."""

    split: Literal["valid", "test"] = "test"
    """Which part of the data."""


@dataclasses.dataclass(frozen=True)
class TableOptions(RunOptions):
    """One run, or a table of many."""

    table: str | None = None
    """A folder of runs, at any depth; prints a table of them."""
    picture: str | None = None
    """A .png file to draw."""

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        return {} if self.table is None else {"json": "with table, which is printed as one"}


@dataclasses.dataclass(frozen=True)
class PictureOptions(OutputOptions):
    """Runs to compare in a picture."""

    workdir: tuple[str, ...] = ("runs/stdlib",)
    """Folders of the runs."""
    picture: str | None = None
    """A .png file to draw."""

    def __post_init__(self):
        if not self.workdir:
            raise ValueError("workdir must be one or more folders, got none")


@dataclasses.dataclass(frozen=True)
class StudyOptions(PictureOptions):
    """A checkpoint of each run, and what it reads."""

    checkpoint: str = "best"
    """best (the best evaluation while training), last, or a step."""
    split: Literal["valid", "test"] = "valid"
    """Which part of each run's data."""
