"""Presets: their networks fit, and those named after a paper train, a step of each kind at small sizes."""

import json

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


BUILT = [
    *TASKS["copy"].presets,
    *TASKS["recall"].presets,
    "btt-8", "mlr-8", "paper-full-8-128-64", "paper-full-1-16-256", "paper-btt-8-64-256", "paper-mlr-8-32-128",
    "lra-listops-original-linformer", "lra-image-original-sparse", "lra-image-original-longformer",
    "lra-image-original-bigbird", "lra-image-original-local", "lra-image-transnormer-flash-quad",
    "lra-image-transnormer-flash", "lra-retrieval-transnormer-linformer", "lra-image-full",
    "stdlib", "wikitext103-transnormer-t1", "wikitext103-local", "openwebtext-brl", "openwebtext-brl-paper",
    "openwebtext-gated-deltanet-brl", "openwebtext-mamba2-full", "owt-chars-alternate-256",
    "owt-chars-global-window-256",
]  # fmt: skip


@pytest.mark.parametrize("name", slow_unless(BUILT, ("btt-8", "lra-image-original-bigbird", "stdlib")))
def test_a_network_fits(name):
    """Traced, not compiled."""
    (task,) = (task for task in TASKS.values() if name in task.presets)
    with jax.numpy_dtype_promotion("standard"):
        task.build(task.sized(task.presets[name]))


def test_presets_of_the_arena_differ():
    configs = [json.dumps(TASKS["lra"].to_json(config)) for config in TASKS["lra"].presets.values()]
    assert len(set(configs)) == len(configs)
