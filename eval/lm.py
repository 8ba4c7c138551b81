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

import flax.linen as nn
import jax
from etils import epath

from brl_jax.layers import mechanism_name
from brl_jax.models import DecoderConfig, DecoderLM
from train.checkpoint import Checkpoints
from train.config import LmConfig, parse_options, read_json
from train.data import load
from train.errors import UserError, command
from train.lm import build_model, held_out_stream, lm_objective
from train.loop import evaluate, held_out_metrics
from train.metrics import say
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
    """A run's configuration, its model, the parameters of one of its checkpoints, and that checkpoint's step.

    Args:
      workdir: the run's folder; checkpoint: "best" (the last where none was measured), "last" or a step.

    Raises:
      UserError: no run or no such checkpoint there, or it is damaged ("last" goes on to the one before it).
    """
    config = read_json(LmConfig, epath.Path(workdir) / "config.json")
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints", say=say)
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"--workdir: no checkpoint in {checkpoints.folder}; expected one that training wrote")
    match checkpoint:
        case "best":
            best = checkpoints.best_step()
            candidates = steps[::-1] if best is None else [best]
        case "last":
            candidates = steps[::-1]
        case _ if checkpoint.isdecimal() and int(checkpoint) in steps:
            candidates = [int(checkpoint)]
        case _:
            raise UserError(
                f"--checkpoint: expected best, last or one of {', '.join(map(str, steps))}, got {checkpoint}"
            )
    model = build_model(config)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        nn.unbox(jax.eval_shape(lm_objective(model).init, jax.random.key(0))),
    )
    for step in candidates:
        try:
            return config, model, checkpoints.restore_params(like, step), step
        except UserError as error:
            if step == candidates[-1]:
                raise
            say(f"{error}; trying the one before it")
    raise AssertionError("unreachable: there is at least one candidate")


def mechanism_names(config: DecoderConfig) -> str:
    """The names of a network's mechanisms, for people: "diag+norm"."""
    used = (config.mechanism, config.late_mechanism)
    return "+".join(dict.fromkeys(mechanism_name(mechanism) for mechanism in used if mechanism is not None))


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
    metrics = held_out_metrics(*sums, held_out.num_bytes)
    result = {
        "perplexity": math.exp(metrics["val_loss"]),
        "bits_per_byte": metrics["val_bits_per_byte"],
        "loss": metrics["val_loss"],
        "tokens": round(sums[1]),
        "step": step,
        "split": options.split,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    sys.exit(command(main, "eval.lm"))
