"""Measuring parameters on held-out data, and which evaluation was the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from train.engine.batch import Batch, num_rows
from train.engine.step import Objective, means


def evaluate(
    eval_step: Callable[..., Any],
    objective: Objective,
    params: Any,
    held_out: Iterable[Batch],
    interrupted: Callable[[], bool] = lambda: False,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> dict[str, float] | None:
    """Sums over held-out data, with memory carried from batch to batch: "loss" (nats), "weight" and the objective's
    averages.

    Args:
      eval_step: jitted `make_eval_step(objective)`.
      held_out: batches, all with the same number of rows.
      interrupted: called before each batch; if it returns True, the evaluation stops and returns None.
      place: puts a batch on the devices.
    """
    memory = None
    sums: list[dict[str, Any]] = []
    for i, batch in enumerate(held_out):
        if interrupted():
            return None
        arrays = place(batch).arrays
        if i == 0:
            rows = num_rows(arrays)
            memory = jax.jit(lambda rows=rows: objective.shard_memory(objective.init_memory(rows), rows))()
        added, memory = eval_step(params, memory, arrays)
        sums.append(added)
    # Summed as Python floats, in double precision: a long text has more tokens than float32 can count.
    return {name: sum(float(added[name]) for added in sums) for name in sums[0]}


def held_out_metrics(sums: Mapping[str, float], num_bytes: int | None) -> dict[str, float]:
    """val_loss in nats per target and the averages as val_NAME; for text also val_bits_per_byte, which is comparable
    between tokenizers. It is left out if the targets cover no bytes."""
    metrics = {f"val_{name}": value for name, value in means(sums).items()}
    if num_bytes:
        metrics["val_bits_per_byte"] = sums["loss"] / math.log(2) / num_bytes
    return metrics


@dataclasses.dataclass
class Best:
    """The best held-out score so far (lower is better), and the number of evaluations since."""

    score: float | None = None
    misses: int = 0

    def is_ended_by(self, score: float | None, patience: int) -> bool:
        """Whether this next score is the last one that `patience` allows."""
        if score is None or self.score is None or score < self.score:
            return False
        return 0 < patience <= self.misses + 1

    def add(self, score: float) -> None:
        if self.score is None or score < self.score:
            self.score, self.misses = score, 0
        else:
            self.misses += 1
