"""The Long Range Arena, a table for each task: BRL-Attention's table 1 and TransNormer's table 6."""

from __future__ import annotations

from eval.tasks.lra_figures import BRL, PAPERS, TRANSNORMER
from eval.tasks.paper_tables.table import PaperTable
from train.data.lra.tasks import LRA_TASKS


def _rows(task: str) -> dict[str, tuple[str | float, ...]]:
    return {
        f"{name} ({paper.rpartition(', ')[2]})": (
            f"lra-{task}-{row.preset}",
            round(row.accuracies[task] / 100, 4),
        )
        for paper in (BRL, TRANSNORMER)
        for name, row in PAPERS[paper].items()
        if task in row.accuracies
    }


TABLES = {
    f"lra-{task}": PaperTable(
        f"{BRL}; {TRANSNORMER}: {task}", "lra", {"accuracy": "test_accuracy"}, _rows(task)
    )
    for task in LRA_TASKS
}
