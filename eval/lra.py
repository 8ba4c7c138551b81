"""Measures classifiers of the Long Range Arena on their test split: python -m eval.lra --workdir DIR.

The last line of stdout is one JSON object: accuracy with its standard error, chance (the share of the most frequent
class, what always naming it would get), how many standard errors lie between them, the balance of the classes, and what
was measured. It is kept as lra_test.json in the run's folder.

python -m eval.lra --table DIR [--picture FILE.png] measures the runs under DIR that have not been, and prints the
tables of the papers as markdown with these runs beside the papers' figures.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from brl_jax.layers import BRLConfig, DiagConfig, LocalConfig, NormConfig
from brl_jax.models import StackConfig
from eval.lra_table import draw, markdown
from eval.plotting import picture_path, save
from eval.runs import mechanism_names, open_run
from train.config import parse_options
from train.data.files import write_whole
from train.data.lra import load
from train.errors import UserError, command
from train.loop import evaluate
from train.lra import build_model, held_out_batches, lra_objective
from train.lra_config import LraConfig
from train.step import make_eval_step, means

_RESULT = "lra_test.json"


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    table: str | None = None
    """A folder of runs, at any depth; prints the papers' tables with them."""
    picture: str | None = None
    """A .png file for a picture of the table."""
    split: Literal["valid", "test"] = "test"
    """Which part of the data."""
    checkpoint: str = "best"
    """best (highest accuracy on validation data), last, or a step."""


def label(model: StackConfig) -> str:
    """A model's name in the tables: the mechanism and what the papers vary."""
    match model.mechanism, model.late_mechanism:
        case BRLConfig(num_compressed=0) as m, None:
            return f"BRL, m = 0 (local), w = {m.window}"
        case BRLConfig() as m, None:
            without = ", without difference" if m.gamma == 0 else ""
            return f"BRL, w = {m.window}, m = {m.num_compressed}{without}"
        case LocalConfig() as m, None:
            return f"local, w = {m.window}"
        case DiagConfig(score="softmax"), NormConfig(feature_map="elu+1"):
            return "TransNormer T2"
        case DiagConfig(score="relu"), NormConfig(feature_map="elu"):
            return "TransNormer T1"
    return mechanism_names(model)


def measure(workdir: str, split: str, checkpoint: str) -> dict[str, Any]:
    """The accuracy of a run and what belongs to it.

    Raises:
      UserError: no run or checkpoint there, or its data cannot be had.
    """
    config, model, params, step = open_run(LraConfig, build_model, lra_objective, workdir, checkpoint)
    source, examples = load(config.data, workdir, (split,))
    objective = lra_objective(model)
    held_out = held_out_batches(examples[split], config)
    sums = evaluate(jax.jit(make_eval_step(objective)), objective, params, held_out)
    assert sums is not None
    metrics = means(sums)
    count = len(examples[split])
    balance = np.bincount(examples[split].labels, minlength=config.model.num_classes) / count
    accuracy, chance = metrics["accuracy"], float(balance.max())
    error = math.sqrt(accuracy * (1 - accuracy) / count)
    return {
        "task": config.data.task,
        "model": label(config.model),
        "accuracy": accuracy,
        "standard_error": error,
        "chance": chance,
        "errors_above_chance": (accuracy - chance) / error if error else None,
        "class_balance": balance.round(4).tolist(),
        "examples": count,
        "loss": metrics["loss"],
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "data": source.name,
        "split": split,
        "step": step,
        "seed": config.loop.seed,
        "workdir": workdir,
    }


def _runs(folder: Path, split: str, checkpoint: str) -> list[dict[str, Any]]:
    """The results of all runs of the Long Range Arena under a folder, measured where they have not been."""
    results = []
    for path in sorted(folder.rglob("config.json")):
        try:
            is_ours = "task" in json.loads(path.read_text())["data"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_ours:
            kept = path.parent / _RESULT
            if split == "test" and checkpoint == "best" and kept.exists():
                results.append(json.loads(kept.read_text()))
            else:
                results.append(_measure_and_keep(str(path.parent), split, checkpoint))
    if not results:
        raise UserError(f"--table: no run of train.lra under {folder}")
    return results


def _measure_and_keep(workdir: str, split: str, checkpoint: str) -> dict[str, Any]:
    result = measure(workdir, split, checkpoint)
    if split == "test" and checkpoint == "best":
        write_whole(epath.Path(workdir) / _RESULT, json.dumps(result, indent=1) + "\n")
    return result


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the tables; see the module's text and --help."""
    options = parse_options(
        EvalOptions(), argv, prog="python -m eval.lra", about="Measures runs on the Long Range Arena."
    )
    if (options.workdir is None) == (options.table is None):
        raise UserError("--workdir, --table: expected one of the two")
    if options.picture is not None and options.table is None:
        raise UserError("--picture: expected with --table only")
    if options.workdir is not None:
        print(json.dumps(_measure_and_keep(options.workdir, options.split, options.checkpoint)))
        return
    picture = picture_path(options.picture)
    results = _runs(Path(options.table or "."), options.split, options.checkpoint)
    print(markdown(results))
    if picture is not None:
        save(draw(results), picture)


if __name__ == "__main__":
    sys.exit(command(main, "eval.lra"))
