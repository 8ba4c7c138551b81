"""Measures networks that classify the nodes of a graph (train.graph): python -m eval.graph --workdir DIR [OPTIONS].

The last line of stdout is one JSON object: micro_f1 and macro_f1 of the test nodes in percent (of one class a node, the
first is the accuracy), the temporary memory in megabytes of a training step's gradients by the compiler, and what was
measured.

python -m eval.graph --table DIR [--picture FILE.png] measures the runs under DIR that have not been measured, averages
those that differ in the seed alone, and prints them as markdown beside the figures of BRL-Attention (OpenReview
Vpyg3fqXbl, tables 4 and 5). The picture has scores, scores by memory (figure 8) and losses (figure 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.graph_table import draw, markdown
from train.cli.summary import mechanism_names
from train.engine.errors import UserError
from train.tasks.graph import GRAPH, GraphData


@dataclasses.dataclass(frozen=True)
class GraphEvalOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""


def f1_scores(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Micro and macro F1 in percent of classes (N,), or of (N, C) zeros and ones where a node may have several.

    Raises:
      UserError: scikit-learn is missing.
    """
    try:
        from sklearn.metrics import f1_score
    except ModuleNotFoundError as error:
        raise UserError("eval.graph needs scikit-learn: pip install -e '.[graph]'") from error
    return {
        f"{average}_f1": 100.0 * float(f1_score(true, predicted, average=average, zero_division=0))
        for average in ("micro", "macro")
    }


def step_megabytes(run: Run, data: GraphData) -> float:
    """The temporary memory of the gradients of a microbatch, as this machine's compiler plans it: what a training step
    needs beside parameters and batch."""
    objective = run.task.objective(run.model, run.config)
    batch = next(iter(run.task.held_out(run.config, data, "valid")))
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.arrays.items()}
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.params)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return objective.loss(params, None, batch, key)[0]

    step = jax.jit(jax.grad(loss)).lower(params, arrays, jax.random.key(0)).compile()
    memory: Any = step.memory_analysis()
    return memory.temp_size_in_bytes / 1e6


class _GraphEvaluation(Evaluation[GraphEvalOptions]):
    kept = "graph_test.json"

    def measure(self, run: Run, options: GraphEvalOptions) -> Measured:
        """The F1 scores of a run."""
        config = run.config
        data = GRAPH.load(config, ("valid", "test"))
        predicted, true = GRAPH.predict(config, run.model, run.params, data, "test")
        network = config.model.network
        return Measured(
            {
                "dataset": Path(config.data.data_dir).stem,
                "network": mechanism_names(config.model) if network in ("tokens", "nodes") else network,
                **f1_scores(predicted, true),
                "nodes": len(true),
                "tokens": len(config.model.kinds),
                "step_megabytes": step_megabytes(run, data),
                "learning_rate": config.optimizer.learning_rate,
                **run_facts(run),
            }
        )


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    _GraphEvaluation(
        [GRAPH],
        GraphEvalOptions(),
        name="eval.graph",
        about="Measures networks that classify nodes.",
        markdown=markdown,
        draw=draw,
    ).main(argv)
