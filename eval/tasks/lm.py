"""Measures a trained language model on held-out text: python -m eval.lm --workdir DIR.

The memory is carried through the whole text. The last line of stdout is one JSON object: perplexity (per
token), bits_per_byte (of the original text, so that tokenizers are comparable), loss (nats per token), tokens, step,
split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from brl_jax.models import DecoderLM
from eval.harness.main import EvalOptions, Evaluation, Measured, measure_split
from eval.harness.runs import Run, open_run
from train.tasks.lm import LM
from train.tasks.lm_config import LmConfig


@dataclasses.dataclass(frozen=True)
class LmEvalOptions(EvalOptions):
    """What to measure."""

    workdir: str = "runs/small"
    """Folder of the run."""
    data: str | None = None
    """Another text than the run's own, as for train.lm; the run's tokenizer reads it."""
    split: Literal["valid", "test"] = "valid"
    """Which part of the text."""


class _LmEvaluation(Evaluation[LmEvalOptions]):
    def measure(self, run: Run, options: LmEvalOptions) -> Measured:
        config = run.config
        if options.data is not None:
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, data=options.data))
        return Measured(measure_split(run._replace(config=config), options.split))


def read_run(workdir: str, checkpoint: str) -> tuple[LmConfig, DecoderLM, Any, int]:
    """The configuration, model, parameters and step of a language model's run; see `eval.harness.runs.open_run`."""
    run = open_run([LM], workdir, checkpoint)
    return run.config, run.model, run.params, run.step


def main(argv: Sequence[str]) -> None:
    """Prints the measures; see the module's text and --help."""
    _LmEvaluation(
        [LM], LmEvalOptions(), name="eval.lm", about="Measures a language model on held-out text."
    ).main(argv)
