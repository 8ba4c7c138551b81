"""The papers' tables next to runs: python -m eval.papers TABLE [--runs DIR] [--cost].

Each row has the paper's figures, the preset that trains it, and the measures of every run under DIR whose folder, or a
folder above it, has the preset's name, or the name and a seed, PRESET-0. The last column lists the settings in which
such a run differs from its preset, as "name preset's -> run's". Measures are those of the last evaluation while
training and those that the evaluation commands keep in the run's folder. Without TABLE the tables are listed. --cost
True prints instead what each row's training takes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from brl_jax.fields import Checked, Positive
from brl_jax.json_files import read_json
from eval.harness.groups import compared
from eval.harness.table import Table
from eval.tasks.paper_tables import TABLES
from eval.tasks.paper_tables.table import PaperTable
from train.cli.options import parse_options
from train.cli.summary import num_parameters
from train.engine.config_file import differences
from train.engine.errors import UserError
from train.engine.fields import Mark, marked
from train.engine.metrics import read_metrics
from train.engine.step import perplexity
from train.engine.throughput import step_flops
from train.tasks.every import TASKS
from train.tasks.task import Task, find_runs, read_config


@dataclasses.dataclass(frozen=True)
class PapersOptions(Checked):
    """What to print."""

    runs: str = "runs"
    """The folder of the runs, at any depth."""
    cost: bool = False
    """Print what training the rows takes instead."""
    tflops: Positive = 200.0
    """TFLOP of matrix products that the machine does a second; 200 is about half of an H100's peak in TF32."""


def measures(workdir: Path) -> dict[str, float]:
    """The numbers in a run's folder: of its last evaluation while training ("val_..."), and those that the evaluation
    commands kept, such as "test_accuracy"."""
    found: dict[str, float] = {}
    if (workdir / "metrics.jsonl").exists():
        for line in read_metrics(workdir):
            found |= {
                name: line[name] for name in line if name.startswith("val_") or name in ("step", "grad_rsd")
            }
    if "val_loss" in found:
        found["val_perplexity"] = perplexity(found["val_loss"])
    for path in sorted(workdir.glob("*_test.json")):
        try:
            kept = read_json(path, dict)
        except (OSError, ValueError) as error:
            raise UserError(f"--runs: {error}") from error
        found |= {f"test_{name}": value for name, value in kept.items() if isinstance(value, (int, float))}
    return found


def other_settings(task: Task[Any, Any], preset: Any, config: Any) -> list[str]:
    """The settings in which a run's configuration differs from a preset's, the seed and what the data decide left
    out."""
    theirs, sized = compared(task, preset), compared(task, task.sized(preset))
    decided = {name for name, value in sized.items() if theirs.get(name) != value}
    return differences(
        theirs, compared(task, config), decided | frozenset(marked(task.config_class, Mark.DECIDED))
    )


def beside_runs(table: PaperTable, folder: Path) -> Table:
    """The table, with a line for each run of a row's preset under the folder."""
    task = TASKS[table.task]
    # The preset for 8 tokens is not the eighth seed of another.
    named = {
        path: [
            part if part in task.presets else re.sub(r"-\d+$", "", part)
            for part in path.relative_to(folder).parts
        ]
        for path in find_runs([task], folder)
    }
    columns: list[str] = []
    for title, measure in table.measures.items():
        columns += [f"{title}, paper", "here"] if measure else [title]
    shown = Table("row", "preset", *columns, "step", "differs from the preset", title=table.source)
    for name, (preset, *figures) in table.rows.items():
        runs: list[Path | None] = [path for path, presets in named.items() if preset in presets]
        for path in runs or [None]:
            found = {} if path is None else measures(path)
            cells: list[Any] = []
            for figure, measure in zip(figures, table.measures.values(), strict=True):
                cells.append(figure)
                if measure:
                    cells.append(f"{found[measure]:.4g}" if measure in found else None)
            others = None
            if path is not None:
                _, config = read_config([task], epath.Path(path) / "config.json")
                others = ", ".join(other_settings(task, task.presets[str(preset)], config))
            shown.add(name, preset or None, *cells, found.get("step"), others)
    return shown


def training_cost(task: Task[Any, Any], preset: Any) -> tuple[int, float]:
    """The parameters of a preset's network, and the operations of the matrix products of its whole training."""
    config = task.sized(preset)
    objective = task.objective(task.build(config), config)
    shapes = jax.eval_shape(objective.init, jax.random.key(0))
    batch = task.batch_shapes(config, config.loop.microbatch)
    a_step = config.loop.accumulation * step_flops(objective, shapes, batch)
    return num_parameters(shapes), config.loop.steps * a_step


def costs(table: PaperTable, tflops: float) -> Table:
    """What training each row of the table takes."""
    task = TASKS[table.task]
    shown = Table(
        "row", "preset", "parameters, M", "EFLOP", f"hours at {tflops:g} TFLOP/s", title=table.source
    )
    for name, (preset, *_) in table.rows.items():
        if preset:
            parameters, operations = training_cost(task, task.presets[str(preset)])
            hours = operations / (tflops * 1e12) / 3600
            shown.add(name, preset, f"{parameters / 1e6:.2f}", f"{operations / 1e18:.3g}", f"{hours:.3g}")
        else:
            shown.add(name, None, None, None, None)
    return shown


def main(argv: Sequence[str]) -> None:
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else None
    about = "The papers' tables next to runs."
    options = parse_options(PapersOptions(), rest, prog="python -m eval.papers TABLE", about=about)
    if name is None:
        table = Table("TABLE", "source", "task")
        for key, each in TABLES.items():
            table.add(key, each.source, f"train.{each.task}")
        table.show()
    elif name not in TABLES:
        raise UserError(f"TABLE: expected one of {', '.join(TABLES)}, got {name!r}")
    elif options.cost:
        costs(TABLES[name], options.tflops).show()
    else:
        beside_runs(TABLES[name], Path(options.runs)).show()
