"""Measures a masked language model on held-out text: python -m eval.mlm --workdir DIR.

The last line of stdout is one JSON object: of the masked tokens of the split, which are the same in every evaluation,
the accuracy, perplexity, loss (nats) and number (tokens); and step and split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eval.harness.main import EvalOptions, Evaluation
from train.tasks.mlm import MLM


@dataclasses.dataclass(frozen=True)
class MlmEvalOptions(EvalOptions):
    """What to measure."""


def main(argv: Sequence[str]) -> None:
    """Prints the measures; see the module's text and --help."""
    Evaluation(
        [MLM],
        MlmEvalOptions(split="valid"),
        name="eval.mlm",
        about="Measures a masked language model on held-out text.",
    ).main(argv)
