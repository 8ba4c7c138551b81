"""Measures a trained language model on held-out text: python -m eval.lm --workdir DIR.

The model reads the whole text and carries its memory along. Prints perplexity (per token), bits_per_byte (of the
original text, so that tokenizers are comparable), loss (nats per token), tokens, step and split: as one JSON object,
or on a terminal, without --json, as two readable lines. Without --data and --checkpoint they are also kept in the
run's folder, as lm_valid.json or lm_test.json.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from eval.harness.main import Evaluation, measure_split
from eval.harness.options import EvalOptions
from eval.harness.runs import Run
from train.tasks.lm import LM


@dataclasses.dataclass(frozen=True)
class LmEvalOptions(EvalOptions):
    """What to measure."""

    workdir: str = "runs/stdlib"
    """Folder of the run."""
    data: str | None = None
    """Read this text instead of the run's own, as for train.lm; the run's tokenizer encodes it."""
    split: Literal["valid", "test"] = "valid"
    """Which part of the text."""


def reading(run: Run, data: str | None) -> Run:
    """The run with other data, if any are named."""
    if data is None:
        return run
    config = dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, data=data))
    return run._replace(config=config)


def measure(run: Run, options: LmEvalOptions) -> dict[str, Any]:
    """The measures of the text that the options name."""
    return measure_split(reading(run, options.data), options)


main = Evaluation(
    [LM],
    LmEvalOptions(),
    "eval.lm",
    "Measures a language model on held-out text.",
    measure,
    kept="lm_{split}.json",
).main
