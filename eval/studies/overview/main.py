"""Writes the table of all mechanisms and README's picture from what was measured: python -m eval.overview.

The table stands in docs/mechanisms.md, and seven of its rows in README.md. What a mechanism can do comes from
`brl_jax.MECHANISMS`. Its figures come from the pages that they were published on, so that no number is kept twice.
The picture shows docs/data/cost.json, which `eval.speed` measured on a CPU, and the H200's table in docs/measured.md.

With --lower True the command first lowers a layer of each mechanism for a TPU and for an NVIDIA GPU, neither of which
has to be there, and notes in docs/data/kernels.json what launches kernels (the extra gpu; minutes). Without it, that
file says so.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from etils import epath

from brl_jax.fields import Checked
from eval.harness.pictures import save
from eval.studies.overview import pages
from eval.studies.overview.kernels import lowered_kernels
from eval.studies.overview.picture import draw
from eval.studies.overview.table import full_table, short_table, with_links
from train.cli.options import parse_options
from train.engine.errors import UserError
from train.engine.storage import write_whole

_MARKS = ("<!-- python -m eval.overview writes what follows -->", "<!-- up to here -->")


@dataclasses.dataclass(frozen=True)
class OverviewOptions(Checked):
    """What to write."""

    root: str = "."
    """The checkout, with README.md and docs/."""
    lower: bool = False
    """Lower a layer of each mechanism again, to see which launch kernels."""


def main(argv: Sequence[str]) -> None:
    """Writes the tables and the picture; see the module's text and --help.

    Raises:
      UserError: the folder is no checkout, or a page lacks a table that the command reads.
    """
    options = parse_options(
        OverviewOptions(),
        argv,
        prog="python -m eval.overview",
        about="Writes docs/mechanisms.md and README's table.",
    )
    root = Path(options.root)
    if not (root / "docs" / "mechanisms.md").exists():
        raise UserError(f"--root: expected a checkout with docs/mechanisms.md, got {root}")
    if options.lower:
        text = json.dumps(lowered_kernels(), indent=1, sort_keys=True) + "\n"
        write_whole(epath.Path(root / "docs" / "data" / "kernels.json"), text)
    for page, text in written(root).items():
        write_whole(epath.Path(page), text)
    save(draw(pages.cost(root), pages.gpu_times(root)), root / "docs" / "cost.png")


def written(root: Path) -> dict[Path, str]:
    """The pages that the command writes to, with their new text."""
    figures = pages.figures(root)
    parts = {
        root / "docs" / "mechanisms.md": with_links(full_table(figures)),
        root / "README.md": with_links(short_table(figures), "docs/"),
    }
    return {page: _between_marks(page, part) for page, part in parts.items()}


def _between_marks(page: Path, part: str) -> str:
    text = page.read_text()
    if any(text.count(mark) != 1 for mark in _MARKS):
        raise UserError(f"{page}: expected the lines {_MARKS[0]!r} and {_MARKS[1]!r} once each")
    before, rest = text.split(_MARKS[0])
    return f"{before}{_MARKS[0]}\n\n{part}\n\n{_MARKS[1]}{rest.split(_MARKS[1])[1]}"
