"""The tables that commands print: Markdown for pages, columns of a terminal for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

Result = Mapping[str, Any]


class Table:
    """Rows of cells under named columns; `str(table)` is Markdown."""

    def __init__(self, *columns: str, title: str = ""):
        self.columns, self.title = columns, title
        self.rows: list[tuple[str, ...]] = []

    def add(self, *cells: object) -> None:
        """Adds a row; None shows as a dash."""
        assert len(cells) == len(self.columns), (self.columns, cells)
        self.rows.append(tuple("-" if cell is None else str(cell) for cell in cells))

    def __str__(self) -> str:
        lines = [self.title, ""] if self.title else []
        lines += [f"| {' | '.join(self.columns)} |", "|---" * len(self.columns) + "|"]
        return "\n".join(lines + [f"| {' | '.join(row)} |" for row in self.rows])

    def show(self) -> None:
        """Prints the table: in columns on a terminal, else as Markdown."""
        if sys.stdout.isatty():
            Console().print(self.for_terminal())
        else:
            print(self, flush=True)

    def for_terminal(self, *, left: int = 1, sections: bool = False) -> RichTable:
        """The table as rich draws it, with so many columns of names on the left. `sections` parts rows whose first
        cells differ."""
        table = RichTable(
            title=self.title, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False
        )
        for i, column in enumerate(self.columns):
            is_name = i < left
            table.add_column(
                column, justify="left" if is_name else "right", no_wrap=is_name, min_width=1 if is_name else 7
            )
        last = None
        for row in self.rows:
            if sections and row[0] != last:
                table.add_section()
                last = row[0]
            table.add_row(*row)
        return table


def seeds(runs: Sequence[Result]) -> str:
    """The seeds of a group of runs."""
    return ", ".join(str(run["seed"]) for run in runs)


def mean_range(values: Sequence[float], digits: int = 3) -> str:
    """A mean, followed by the lowest and the highest of several values."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def mean_deviation(values: Sequence[float]) -> tuple[float, float, int]:
    """The mean, the sample standard deviation (0 for a single value), and how many values there are."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return float(np.mean(values)), deviation, len(values)


def plus_minus(mean: float, spread: float, count: int, digits: int = 2) -> str:
    """A mean and its spread; the mean alone of a single value, which has none."""
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if count > 1 else "")


def percent(values: Sequence[float]) -> str:
    """`mean_range` of shares, in percent with one digit."""
    return mean_range([100 * value for value in values], 1)


def straight_line(tokens: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """The least squares line, its slope, its value at 0 and R^2."""
    slope, start = np.polyfit(np.asarray(tokens, float), np.asarray(values, float), 1)
    rest = np.asarray(values) - (slope * np.asarray(tokens) + start)
    spread = np.sum((np.asarray(values) - np.mean(values)) ** 2)
    share = 1 - np.sum(rest**2) / spread if spread else 1.0
    return {"slope": float(slope), "at_0": float(start), "r_squared": float(share)}


def fitted_exponent(rows: Sequence[Result], what: str, fit_from: int) -> float | None:
    """Slope of log(row[what]) over log(row["length"]), by least squares over lengths of at least `fit_from`.

    All lengths count if that leaves fewer than two; None if there are fewer than two in all.
    """
    points = [(row["length"], row[what]) for row in rows if row.get(what)]
    long = [point for point in points if point[0] >= fit_from]
    points = long if len({n for n, _ in long}) > 1 else points
    if len({n for n, _ in points}) < 2:
        return None
    return straight_line(*np.log(np.asarray(points, np.float64)).T)["slope"]
