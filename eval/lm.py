"""Measures a trained language model on held-out text: python -m eval.lm --workdir DIR.

The memory is carried through the whole text. The last line of stdout is one JSON object: perplexity (per
token), bits_per_byte (of the original text, so that tokenizers compare), loss (nats per token), tokens, step,
split.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, Literal

import jax

from brl_jax.models import DecoderLM
from eval.runs import open_run
from train.config import LmConfig, parse_options
from train.data import load
from train.errors import UserError, command
from train.lm import build_model, held_out_stream, lm_objective
from train.loop import evaluate, held_out_metrics
from train.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to measure."""

    workdir: str = "runs/small"
    """Folder of the run."""
    data: str | None = None
    """Another text than the run's own, as for train.lm; the run's tokenizer reads it."""
    split: Literal["valid", "test"] = "valid"
    """Which part of the text."""
    checkpoint: str = "best"
    """best (lowest held-out loss), last, or a step."""


def read_run(workdir: str, checkpoint: str) -> tuple[LmConfig, DecoderLM, Any, int]:
    """A language model's `eval.runs.open_run`."""
    return open_run(LmConfig, build_model, lm_objective, workdir, checkpoint)


def main(argv: Sequence[str]) -> None:
    """Prints the measures; see the module's text and --help."""
    options = parse_options(
        EvalOptions(), argv, prog="python -m eval.lm", about="Measures a language model on held-out text."
    )
    config, model, params, step = read_run(options.workdir, options.checkpoint)
    data = config.data if options.data is None else dataclasses.replace(config.data, data=options.data)
    _, corpora = load(data, options.workdir, (options.split,))
    if options.split not in corpora:
        raise UserError(f"--split: {data.data} has no {options.split} text; expected valid")
    held_out = held_out_stream(corpora[options.split], config, 0)
    objective = lm_objective(model)
    sums = evaluate(jax.jit(make_eval_step(objective)), objective, params, held_out)
    assert sums is not None
    metrics = held_out_metrics(sums, held_out.num_bytes)
    result = {
        "perplexity": math.exp(metrics["val_loss"]),
        "bits_per_byte": metrics["val_bits_per_byte"],
        "loss": metrics["val_loss"],
        "tokens": round(sums["weight"]),
        "step": step,
        "split": options.split,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(command(main, "eval.lm"))
