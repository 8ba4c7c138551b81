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

# The rows of the first table of docs/recall.md that name a mechanism in words.
_RECALL_NAMES = {
    "full": "full",
    "local": "local",
    "BRL, layer memory, m 16 (the default: beta 0)": "brl",
    "native sparse attention": "native_sparse",
    "DeltaNet": "deltanet",
    "KDA": "kda",
    "Gated DeltaNet-2": "gated_deltanet_2",
    "RWKV-7": "rwkv7",
    "Mamba-2": "mamba2",
    "Gated DeltaNet": "gated_deltanet",
    "BSBR, chunks of 8": "bsbr",
    "RetNet": "retnet",
    "GLA": "gla",
}
# What the tables of docs/measured.md call the functions under a mechanism's layer.
_GPU_NAMES = {
    "full": "full",
    "local, window 256": "local",
    "linear": "linear",
    "norm": "norm",
    "linear with one decay for each token and head": "mamba2",
    "delta rule": "deltanet",
    "gated delta rule": "gated_deltanet",
    "GLA (decay for each feature)": "gla",
    "KDA (decay for each feature)": "kda",
    "full, cuDNN": "full",
    "diag, XLA": "diag",
    "GAU, 1 head": "gau",
    "BSBR, XLA": "bsbr",
}
#: The tokens of the layers' and the GPUs' tables.
LENGTH = 16384


class Figures(NamedTuple):
    """What was measured of mechanisms, by name.

    Attributes:
      recall: percent of 8 records right at the length of training, mean of the seeds.
      nats: held-out nats a byte; of an earlier version of the networks where there are no others: earlier_nats.
      cpu: thousands of tokens a second of one layer, forward and backward, on one core.
      gpu: millions of tokens a second of the function, forward and backward, on an H200; h100: on an H100.
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
    h200 = _tables(docs / "measured.md", "runs through")
    (h100,) = _tables(docs / "measured.md", "temporary MiB")
    return Figures(
        recall=_recall(_tables(docs / "recall.md", "64/8")),
        nats=nats,
        earlier_nats={name: figure for name, figure in earlier.items() if name not in nats},
        cpu={
            row["layer"].strip("`"): LENGTH / _number(row["forward + backward, ms"])
            for row in _tables(docs / "results.md", "one more token, ms")[0]
        },
        gpu=_gpu_rates([row for rows in h200 for row in rows]),
        h100=_gpu_rates(h100),
        sharded=_sharded(docs / "pods.md"),
        kernels=json.loads((docs / "data" / "kernels.json").read_text()),
    )


def cost(root: Path) -> list[dict[str, Any]]:
    """The rows that `eval.speed` wrote for the picture."""
    return json.loads((root / "docs" / "data" / "cost.json").read_text())["rows"]


def gpu_times(root: Path) -> dict[str, float]:
    """Milliseconds on the H200 with the backward pass, by what the first column of its tables says."""
    times: dict[str, float] = {}
    for rows in _tables(root / "docs" / "measured.md", "runs through"):
        for row in rows:
            times.setdefault(next(iter(row.values())), _number(row["with backward"]))
    return times


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


def _recall(tables: list[list[Row]]) -> dict[str, str]:
    """The first row of each mechanism in any of the tables."""
    found: dict[str, str] = {}
    for rows in tables:
        for row in rows:
            first = next(iter(row.values()))
            listed = re.match(r"`(\w+)[^`]*`(.*)", first)
            name = listed[1] if listed and "late_mechanism" not in first else _RECALL_NAMES.get(first, "")
            if name in MECHANISMS:
                found.setdefault(name, row["64/8"].split(" ")[0])
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


def _gpu_rates(rows: list[Row]) -> dict[str, float]:
    """Millions of tokens a second, by the first row of each mechanism."""
    rates: dict[str, float] = {}
    for row in rows:
        name = _GPU_NAMES.get(next(iter(row.values())))
        if name is not None:
            rates.setdefault(name, LENGTH / _number(row["with backward"]) / 1e3)
    return rates


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
