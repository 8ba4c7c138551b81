"""docs/presets.md describes the presets correctly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from eval.tasks.paper_tables import TABLES
from train.engine.config_file import flatten
from train.tasks.every import TASKS

PAGE = (Path(__file__).parents[2] / "docs" / "presets.md").read_text()


class Described(NamedTuple):
    """A table of the page: the task and the presets named above it, and its rows of four cells."""

    task: str
    presets: tuple[str, ...]
    rows: list[list[str]]


def _tables() -> list[Described]:
    found = []
    parts = re.findall(
        r"^`train\.(\w+)`: ((?:`[^`]+`,?\s+)+)\| setting.*\n\|---.*\n((?:\|.*\n)+)", PAGE, re.M
    )
    for command, presets, rows in parts:
        cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows.splitlines()]
        found.append(Described(command, tuple(re.findall("`([^`]+)`", presets)), cells))
    assert len(found) == PAGE.count("| setting |")
    return found


DESCRIBED = _tables()


def _presets(command: str) -> dict:
    """The presets of a command, by name."""
    return {name: (task, config) for task in TASKS.values() if re.split("[-_]", task.name)[0] == command
            for name, config in task.presets.items()}  # fmt: skip


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("table", DESCRIBED, ids=lambda table: table.presets[0])
def test_settings_match_the_presets(table):
    known = _presets(table.task)
    values = [flatten(known[name][0].to_json(known[name][1])) for name in table.presets]
    for setting, text, ours, source in table.rows:
        each = [_shown(of[setting.strip("`")]) for of in values]
        assert ours == (each[0] if len(set(each)) == 1 else ", ".join(each)), setting
        assert text, setting
        assert source, setting


def test_presets_of_the_papers_data_are_all_there():
    named = {name for table in DESCRIBED for name in table.presets}
    own = set(re.findall("`([^`]+)`", PAGE.partition("## Our own forms")[2]))
    papers = {
        name
        for command in ("lm", "mlm")
        for name in _presets(command)
        if re.match("wikitext103|openwebtext|owt|roberta", name)
    }
    assert papers - named - own == set()
    assert not named & own


@pytest.mark.parametrize("name", TABLES)
def test_rows_have_presets_and_a_figure_for_each_column(name):
    table = TABLES[name]
    for row, (preset, *figures) in table.rows.items():
        assert not preset or preset in TASKS[table.task].presets, row
        assert len(figures) == len(table.measures), row
