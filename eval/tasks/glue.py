"""Measures a fine-tuned network on a task of GLUE: python -m eval.glue --workdir DIR.

The last line of stdout is one JSON object: the task's own metrics on GLUE's dev split, in percent (Matthews'
correlation for cola, F1 and accuracy for mrpc and qqp, Pearson's and Spearman's correlation for stsb, the accuracy of
both dev splits for mnli, and accuracy for the others), and what was measured.

python -m eval.glue --table DIR [--picture FILE.png] measures the runs under DIR that have not been measured, averages
those that differ in the seed alone, and prints them as markdown beside the figures of TransNormer (arXiv:2210.10340,
table 5).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.glue_table import draw, markdown
from train.cli.summary import mechanism_names
from train.data.glue import GLUE_TASKS
from train.engine.errors import UserError
from train.tasks.glue import GLUE


@dataclasses.dataclass(frozen=True)
class GlueEvalOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""


def task_metrics(task: str, predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """The metrics of a task in percent, by name; a correlation of predictions that are all alike is 0.

    Raises:
      UserError: scikit-learn is missing.
    """
    try:
        from sklearn import metrics as sklearn_metrics
    except ModuleNotFoundError as error:
        raise UserError("eval.glue needs scikit-learn: pip install -e '.[glue]'") from error
    from scipy import stats

    def correlation(function: Any) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", stats.ConstantInputWarning)
            return float(np.nan_to_num(function(predicted, true).statistic))

    functions = {
        "accuracy": lambda: sklearn_metrics.accuracy_score(true, predicted),
        "f1": lambda: sklearn_metrics.f1_score(true, predicted),
        "matthews": lambda: sklearn_metrics.matthews_corrcoef(true, predicted),
        "pearson": lambda: correlation(stats.pearsonr),
        "spearman": lambda: correlation(stats.spearmanr),
    }
    return {name: 100.0 * float(functions[name]()) for name in GLUE_TASKS[task].metrics}


class _GlueEvaluation(Evaluation[GlueEvalOptions]):
    kept = "glue_test.json"

    def measure(self, run: Run, options: GlueEvalOptions) -> Measured:
        """The metrics of a run, by split where there are several."""
        config = run.config
        name = config.data.task
        found: dict[str, Mapping[str, float]] = {}
        for split in GLUE_TASKS[name].tests:
            data = GLUE.load(config, (split,))
            found[split] = task_metrics(name, *GLUE.predict(config, run.model, run.params, data, split))
            examples = len(data.examples[split])
        single = len(found) == 1
        measured = {
            metric if single else f"{metric}_{split.removeprefix('dev_')}": value
            for split, metrics in found.items()
            for metric, value in metrics.items()
        }
        return Measured(
            {
                "task": name,
                **measured,
                "metrics": list(measured),
                "examples": examples,
                "model": mechanism_names(config.model),
                "pretrained": not config.from_scratch,
                "learning_rate": config.optimizer.learning_rate,
                "steps": config.loop.steps,
                **run_facts(run),
            }
        )


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    _GlueEvaluation(
        [GLUE],
        GlueEvalOptions(),
        name="eval.glue",
        about="Measures fine-tuned networks on GLUE.",
        markdown=markdown,
        draw=draw,
    ).main(argv)
