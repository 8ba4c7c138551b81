"""The networks of presets fit, and the arena's presets differ."""

import json

import jax
import pytest

from tests.marks import slow_unless
from train.tasks.every import TASKS

BUILT = [
    *TASKS["copy"].presets,
    *TASKS["recall"].presets,
    "btt-8", "mlr-8", "paper-full-8-128-64", "paper-full-1-16-256", "paper-btt-8-64-256", "paper-mlr-8-32-128",
    "lra-listops-original-linformer", "lra-image-original-sparse", "lra-image-original-longformer",
    "lra-image-original-bigbird", "lra-image-original-local", "lra-image-transnormer-flash-quad",
    "lra-image-transnormer-flash", "lra-retrieval-transnormer-linformer", "lra-image-full",
    "stdlib", "wikitext103-transnormer-t1", "wikitext103-local", "openwebtext-brl", "openwebtext-brl-paper",
    "openwebtext-gated-deltanet-brl", "openwebtext-mamba2-full", "owt-chars-alternate-256",
    "owt-chars-global-window-256", "wikitext103-brl-paper-64", "wikitext103-brl-paper-128-gamma-0",
    "wikitext103-transnormer-vanilla", "wikitext103-transnormer-flash-quad", "wikitext103-transnormer-long-short",
    "wikitext103-tlinformer-512-512-0.5", "bsbr-compressed-4", "roberta-full", "roberta-full-linear",
    "roberta-transnormer-t1-parallel", "roberta-transnormer-t2-n-d",
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
