"""Measures classifiers of the Long Range Arena on their test split: python -m eval.lra --workdir DIR.

The last line of stdout is one JSON object: accuracy with its standard error, chance (the accuracy of always answering
the most frequent class), how many standard errors lie between them, the balance of the classes, and what was measured.
It is kept as lra_test.json in the run's folder.

python -m eval.lra --table DIR [--picture FILE.png] measures the runs under DIR that have not been measured, and prints
the tables of the papers as markdown, with these runs beside the papers' figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from brl_jax.layers import BRLConfig, DiagConfig, LocalConfig, NormConfig
from brl_jax.models import StackConfig
from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.lra_table import draw, markdown
from train.cli.summary import mechanism_names
from train.tasks.lra import LRA


@dataclasses.dataclass(frozen=True)
class LraEvalOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    split: Literal["valid", "test"] = "test"
    """Which part of the data."""


def _window(mechanism: BRLConfig | LocalConfig) -> str:
    """The keys that a token sees: w = 64, or 7 x 7 in two dimensions."""
    if mechanism.pattern == "neighbourhood":
        side = 2 * (mechanism.window // 2) + 1
        return f"{side} x {side}"
    pattern = "" if mechanism.pattern == "sliding" else f", {mechanism.pattern}"
    return f"w = {mechanism.window}{pattern}"


def label(model: StackConfig) -> str:
    """A model's name in the tables: the mechanism and what the papers vary."""
    match model.mechanism, model.late_mechanism:
        case BRLConfig(num_compressed=0) as m, None:
            return f"BRL, m = 0 (local), {_window(m)}"
        case BRLConfig() as m, None:
            memory = "" if m.memory == BRLConfig.memory else f", {m.memory} memory"
            without = ", without difference" if m.gamma == 0 else ""
            return f"BRL, {_window(m)}, m = {m.num_compressed}{memory}{without}"
        case LocalConfig() as m, None:
            return f"local, {_window(m)}"
        case DiagConfig(score="softmax"), NormConfig(feature_map="elu+1"):
            return "TransNormer T2"
        case DiagConfig(score="relu"), NormConfig(feature_map="elu"):
            return "TransNormer T1"
    return mechanism_names(model)


KEPT = "lra_test.json"
"""The file of a run's folder that keeps its measures on the test split."""


class _LraEvaluation(Evaluation[LraEvalOptions]):
    kept = KEPT

    def measure(self, run: Run, options: LraEvalOptions) -> Measured:
        """The accuracy of a run and what was measured."""
        config = run.config
        data = run.task.load(config, (options.split,))
        return Measured(
            {
                "task": config.data.task,
                "model": label(config.model),
                **run.task.measure(config, run.model, run.params, data, options.split),
                "data": data.source.name,
                "split": options.split,
                **run_facts(run),
            }
        )

    def is_standard(self, options: LraEvalOptions) -> bool:
        return options.split == "test" and super().is_standard(options)


_EVALUATION = _LraEvaluation(
    [LRA],
    LraEvalOptions(),
    name="eval.lra",
    about="Measures runs on the Long Range Arena.",
    markdown=markdown,
    draw=draw,
)


def measure_run(workdir: str) -> dict[str, Any]:
    """Measures a run on the test split and keeps the result in its folder.

    Raises:
      UserError: there is no run, or its data cannot be read.
    """
    return _EVALUATION.measure_and_keep(workdir, LraEvalOptions()).result


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the tables; see the module's text and --help."""
    _EVALUATION.main(argv)
