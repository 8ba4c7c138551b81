"""Presets named after a paper train: a step of each kind of network, at small sizes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.marks import slow_unless
from train.cli.options import parse
from train.tasks.every import TASKS

SMALL = "--d_model 32 --num_heads 2 --d_ff 48 --tokenizer bytes --batch 2 --accumulation 1 --length 32"
# BRL's last layer compresses for nobody: its compressed tokens' network has no gradient.
CASES = {
    "wikitext103-brl-paper-64": "--num_layers 2 --mechanism.block_size 16 --mechanism.history_size 16",
    "wikitext103-brl-paper-128-gamma-0": "--num_layers 2 --mechanism.block_size 32 --mechanism.history_size 32",
    "wikitext103-transnormer-vanilla": "--num_layers 1",
    "wikitext103-transnormer-flash-quad": "--num_layers 1",
    "wikitext103-transnormer-long-short": "--num_layers 1",
    "wikitext103-tlinformer-512-512-0.5": "--num_layers 4 --mechanism.window 8 --mechanism.context 8",
    "bsbr-compressed-4": "--num_layers 1 --mechanism.num_compressed 8 --mechanism.chunk_size 8",
    "roberta-full": "--num_layers 1",
    "roberta-full-linear": "--num_layers 2",
    "roberta-transnormer-t1-parallel": "--num_layers 1",
    "roberta-transnormer-t2-n-d": "--num_layers 2",
}


@pytest.mark.parametrize(
    "name", slow_unless(list(CASES), ("wikitext103-brl-paper-64", "roberta-full-linear"))
)
def test_a_step(name):
    task = TASKS["mlm" if name.startswith("roberta") else "lm"]
    argv = [*f"{name} {SMALL} {CASES[name]}".split(), "--dtype", "float32"]
    config = task.sized(parse(task.presets, "", argv, prog="p", about="a"))
    objective = task.objective(task.build(config), config)
    params = nn.unbox(jax.jit(objective.init)(jax.random.key(0)))
    shapes = task.batch_shapes(config, 2)
    rng = np.random.default_rng(0)
    batch = {
        key: rng.integers(0, 32, x.shape).astype(x.dtype)
        if x.dtype == jnp.int32
        else np.ones(x.shape, x.dtype)
        for key, x in shapes.items()
    }
    batch |= {"lengths": np.full(2, 32, np.int32)} if "lengths" in batch else {}
    batch |= {"segment_ids": np.repeat([[0] * 13 + [1] * 19], 2, axis=0)} if "segment_ids" in batch else {}

    def loss(params, memory):
        sums, memory = objective.sums(params, memory, batch, jax.random.key(1))
        return sums["loss"] / sums["weight"], memory

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (first, memory), _ = step(params, objective.init_memory(2))
    # In the second step the memory of a stream is not empty.
    (value, _), grads = step(params, memory)
    assert 0.5 * np.log(256) < first < 2 * np.log(256)
    assert np.isfinite(value)
    flat = jax.tree_util.tree_leaves_with_path(grads)
    still = [jax.tree_util.keystr(path) for path, grad in flat if not np.any(grad)]
    assert all(np.isfinite(grad).all() for _, grad in flat)
    assert not [path for path in still if "bias" not in path], still
