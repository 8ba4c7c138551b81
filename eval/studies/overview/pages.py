"""Reads figures from the tables of the documentation's pages, which are where they were published."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brl_jax.layers import MECHANISMS
from train.engine.errors import UserError

Row = dict[str, str]

#: The tokens of the layers' and the GPUs' tables.
LENGTH = 16384


class Figures(NamedTuple):
    """What was measured of mechanisms, by name.

    Attributes:
      recall: percent of 8 records right at the length of training, mean of the seeds.
      nats: held-out nats a byte; earlier_nats: by an earlier version of the networks, for the mechanisms without nats.
      cpu: thousands of tokens a second of one layer, forward and backward, on one core.
      gpu: milliseconds of the function, forward and backward, on an H200; h100: on an H100.
      sharded: whose rows can be divided over devices without gathering them.
      kernels: for "tpu" and "cuda", whose kernels a layer launches.
    """

    recall: Mapping[str, str]
    nats: Mapping[str, str]
    earlier_nats: Mapping[str, str]
    cpu: Mapping[str, float]
    gpu: Mapping[str, float]
    h100: Mapping[str, float]
    sharded: frozenset[str]
    kernels: Mapping[str, Mapping[str, Sequence[str]]]


def figures(root: Path) -> Figures:
    """All figures of the checkout's pages. Raises UserError if a page lacks a table."""
    docs = root / "docs"
    nats, earlier = (_nats(rows) for rows in _tables(docs / "results.md", "held-out nats a byte")[:2])
    return Figures(
        recall={
            name: row["64/8"].split(" ")[0]
            for name, row in _first_rows(_tables(docs / "recall.md", "64/8")).items()
        },
        nats=nats,
        earlier_nats={name: figure for name, figure in earlier.items() if name not in nats},
        cpu={
            row["layer"].strip("`"): LENGTH / _number(row["forward + backward, ms"])
            for row in _tables(docs / "results.md", "one more token, ms")[0]
        },
        gpu=_gpu_times(_tables(docs / "measured.md", "runs through")),
        h100=_gpu_times(_tables(docs / "measured.md", "temporary MiB")),
        sharded=_sharded(docs / "pods.md"),
        kernels=json.loads((docs / "data" / "kernels.json").read_text()),
    )


def cost(root: Path) -> list[dict[str, Any]]:
    """The rows that `eval.speed` wrote for the picture."""
    return json.loads((root / "docs" / "data" / "cost.json").read_text())["rows"]


def _tables(page: Path, column: str) -> list[list[Row]]:
    """The rows of each table of a page that has the column."""
    found = [rows for columns, rows in _all_tables(page.read_text()) if column in columns]
    if not found:
        raise UserError(f"{page}: expected a table with the column {column!r}")
    return found


def _all_tables(text: str) -> Iterator[tuple[list[str], list[Row]]]:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns, _, *rows = (
            [cell.strip() for cell in line.strip("|\n").split(" |")] for line in table.splitlines()
        )
        yield columns, [dict(zip(columns, row)) for row in rows]


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _first_rows(tables: list[list[Row]]) -> dict[str, Row]:
    """The first row of each mechanism in any of the tables, which begins with the mechanism's name."""
    found: dict[str, Row] = {}
    for row in (row for rows in tables for row in rows):
        first = next(iter(row.values()))
        listed = re.match(r"`(\w+)", first)
        if listed and listed[1] in MECHANISMS and "late_mechanism" not in first:
            found.setdefault(listed[1], row)
    return found


def _nats(rows: list[Row]) -> dict[str, str]:
    """For each mechanism the row that changes the fewest of its options, without a second mechanism."""
    best: dict[str, tuple[int, str]] = {}
    for row in rows:
        what = row["what the row names"]
        named = re.match(r"`--mechanism (\w+)", what)
        if named is None or "late_mechanism" in what:
            continue
        candidate = what.count("--"), row["held-out nats a byte"]
        best[named[1]] = min(best.get(named[1], candidate), candidate)
    return {name: figure for name, (_, figure) in best.items()}


def _gpu_times(tables: list[list[Row]]) -> dict[str, float]:
    return {name: _number(row["with backward"]) for name, row in _first_rows(tables).items()}


def _sharded(page: Path) -> frozenset[str]:
    """The mechanisms of the table of what a device gets from others, except those that gather keys and values."""
    (rows,) = _tables(page, "what a device gets from others")
    found = set()
    for row in rows:
        if "of the row" in row["what a device gets from others"]:
            continue
        for pattern in re.findall(r"`(\w+\*?)`", row["mechanism"]):
            found |= {name for name in MECHANISMS if re.fullmatch(pattern.replace("*", ".*"), name)}
    return frozenset(found)
