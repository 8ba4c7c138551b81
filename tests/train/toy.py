"""A tiny task for tests of the loop: a bigram model with dropout, in which a row remembers its last token."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from train.engine.batch import Batch
from train.engine.config import LoopConfig
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective

VOCAB = 7


def _init(key):
    first, second = jax.random.split(key)
    table = 0.1 * jax.random.normal(first, (VOCAB, VOCAB))
    past = 0.1 * jax.random.normal(second, (VOCAB, VOCAB))
    return {
        "table": nn.LogicallyPartitioned(table, ("vocab", "embed")),
        "past": nn.LogicallyPartitioned(past, ("vocab", "embed")),
    }


def _loss(params, memory, batch, key):
    logits = params["table"][batch["tokens"]] + params["past"][memory][:, None]
    if key is not None:
        logits = logits * jax.random.bernoulli(key, 0.8, logits.shape).astype(logits.dtype)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    weights = batch.get("weights", jnp.ones(picked.shape, jnp.float32))
    return -jnp.sum(picked * weights), jnp.sum(weights), batch["tokens"][:, -1]


OBJECTIVE = Objective(_init, _loss, lambda rows: jnp.zeros(rows, jnp.int32))
OPTIMIZER = OptimizerConfig(learning_rate=0.05, warmup_steps=3)


def batch_of(seed, rows=4, length=3):
    """Random tokens, usually followed by the next one in the vocabulary."""
    rng = np.random.default_rng([seed])
    tokens = rng.integers(VOCAB, size=(rows, length)).astype(np.int32)
    noise = rng.random((rows, length)) < 0.1
    return {"tokens": tokens, "targets": np.where(noise, tokens, (tokens + 1) % VOCAB).astype(np.int32)}


class ToyStream:
    """Batches numbered by step, five per pass. `at` maps a step to what happens when its batch is fetched."""

    def __init__(self, rows=4, at=None):
        self.step, self.rows, self.at, self.closed = 0, rows, at or {}, False

    def __iter__(self):
        return self

    def __next__(self):
        self.at.get(self.step, lambda: None)()
        batch = Batch(batch_of(self.step, self.rows), reset=np.bool_(self.step % 5 == 0))
        self.step += 1
        return batch

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]

    def close(self):
        self.closed = True


class ToyHeldOut:
    """Three batches; `at` as in ToyStream."""

    batch, num_bytes, digest = 2, 20, None

    def __init__(self, at=None):
        self.at = at or {}

    def __iter__(self):
        for i in range(3):
            self.at.get(i, lambda: None)()
            yield Batch(batch_of(1000 + i, 2), reset=np.bool_(i == 0))


def loop_config(workdir, **changes):
    """A short run in `workdir`."""
    settings = {"steps": 12, "batch": 4, "accumulation": 2, "eval_every": 4, "checkpoint_every": 3}
    return LoopConfig(workdir=str(workdir), **(settings | {"tensorboard": False} | changes))
