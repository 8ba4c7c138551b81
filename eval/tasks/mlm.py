"""Measures a masked language model on held-out text: python -m eval.mlm --workdir DIR.

Prints accuracy, perplexity, loss (nats) and number of the masked tokens of the split, which are the same in every
evaluation, step and split: as one JSON object, or on a terminal, without --json, as two readable lines.
"""

from eval.harness.main import Evaluation
from eval.harness.options import EvalOptions
from train.tasks.mlm import MLM

main = Evaluation(
    [MLM], EvalOptions(split="valid"), "eval.mlm", "Measures a masked language model on held-out text."
).main
