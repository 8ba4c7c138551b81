"""Batches of random numbers, for commands that look at a task's programs and not at its data."""

from __future__ import annotations

from typing import Any

import numpy as np

from train.engine.batch import Batch
from train.tasks.task import Task


def make_batch(task: Task[Any, Any], config: Any, step: int = 0) -> Batch:
    """A batch of random numbers in the shapes of a task's batches. Tokens with targets form a text that can be learned:
    three times out of four a token follows from the one before it."""
    rng = np.random.default_rng([5, step])
    shapes = task.batch_shapes(config, config.loop.batch)
    batch: dict[str, Any] = {}
    for name, x in shapes.items():
        if name == "tokens":
            size = config.model.vocab_size
            text = rng.integers(size, size=(*x.shape[:-1], x.shape[-1] + 1)).astype(np.int32)
            for t in range(1, text.shape[-1]):
                follows = rng.random(x.shape[:-1]) < 0.75
                text[..., t] = np.where(follows, (text[..., t - 1] * 5 + 1) % size, text[..., t])
            batch["tokens"], batch["targets"] = text[..., :-1], text[..., 1:]
        elif name == "targets" and ("tokens" not in shapes or shapes["tokens"].shape != x.shape):
            model = config.model  # answers at places of the row are tokens
            is_token = "places" in shapes
            classes = model.vocab_size if is_token else model.num_classes
            batch[name] = rng.integers(classes, size=x.shape).astype(np.int32)
        elif name == "source":
            batch[name] = rng.integers(config.model.vocab_size, size=x.shape).astype(np.int32)
        elif name == "source_lengths":
            batch[name] = np.full(x.shape, shapes["source"].shape[-1], np.int32)
        elif name == "places":
            batch[name] = rng.integers(shapes["tokens"].shape[-1], size=x.shape).astype(np.int32)
        elif name == "lengths":
            batch[name] = np.full(x.shape, shapes["tokens"].shape[-1], np.int32)
        elif name == "segment_ids":
            batch[name] = np.cumsum(rng.random(x.shape) < 0.1, axis=-1, dtype=np.int32)
        elif name in ("weights", "present"):
            batch[name] = np.ones(x.shape, x.dtype)
        elif name != "targets":
            batch[name] = rng.standard_normal(x.shape).astype(np.float32)
    return Batch(batch, reset=np.bool_(step == 0))
