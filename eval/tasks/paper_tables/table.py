"""What a paper's table consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

#: Columns that several tables have.
PERPLEXITIES = {"PPL (val)": "val_perplexity", "PPL (test)": "test_perplexity"}
VALIDATION_LOSS = {"validation loss": "val_loss"}


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table of a paper.

    Attributes:
      source: the paper and the table.
      task: the task of its runs, a name in `train.tasks.every.TASKS`.
      measures: the titles of its columns, each with the measure of a run that belongs there
        (`eval.tasks.papers.measures`), "" where `eval.speed` measures it and not a run.
      rows: by the paper's name, the preset that trains the row ("" if no preset does) and the row's figures (None
        if the paper lacks one).
    """

    source: str
    task: str
    measures: Mapping[str, str]
    rows: Mapping[str, tuple[str | float | None, ...]]
