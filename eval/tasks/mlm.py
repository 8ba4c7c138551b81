"""Measures a masked language model on held-out text: python -m eval.mlm --workdir DIR.

The last line of stdout is one JSON object: accuracy, perplexity, loss (nats) and number (tokens) of the masked tokens
of the split, which are the same in every evaluation; step and split.
"""

from eval.harness.main import Evaluation
from eval.harness.options import EvalOptions
from train.tasks.mlm import MLM

main = Evaluation(
    [MLM], EvalOptions(split="valid"), "eval.mlm", "Measures a masked language model on held-out text."
).main
