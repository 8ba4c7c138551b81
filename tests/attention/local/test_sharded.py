"""Attention on sequences that are cut over four devices: the same numbers as on one, and what travels between them."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from brl_jax import SlidingWindow, Strided
from brl_jax.attention.local import sharded

ROOT = Path(__file__).parents[3]
NAMES = re.findall(r'^    "(.*)": ', (Path(__file__).parent / "on_four_devices.py").read_text(), re.MULTILINE)

pytestmark = pytest.mark.xdist_group("four devices")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What `on_four_devices` wrote."""
    path = tmp_path_factory.mktemp("four") / "results.pickle"
    line = [sys.executable, "-m", "tests.attention.local.on_four_devices", str(path)]
    done = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients_are_those_of_one_device(results, name):
    if results[name] is None:
        pytest.skip("JAX 0.12 can look at a kernel neither under shard_map nor, sharing a result, under vmap")
    whole, stretches = results[name]
    for expected, got in zip(whole, stretches, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
        assert np.abs(expected).max() > 0.01


def test_every_case_is_looked_at(results):
    assert set(NAMES) == results.keys() - {"travelled", "kernels"}


def test_only_the_window_travels(results):
    """Of the 1024 keys and values (16 numbers each) on a device, only the 15 that a window reaches are sent."""
    kinds = {kind for kind, _ in results["travelled"]}
    assert kinds == {"collective-permute"}
    assert max(size for _, size in results["travelled"]) <= 2 * 15 * 16


def test_on_a_tpu_a_short_halo_takes_the_kernel_for_windows(results):
    near, far = results["kernels"]
    assert near == ["window_attention_backward", "window_attention_forward"]
    assert "block_attention_forward" in far


def test_unbounded_patterns_are_refused():
    x = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(ValueError, match=r"pattern must see a bounded stretch .* got Strided"):
        sharded.local_attention(x, x, x, axis_name="sequence", pattern=Strided(2), is_causal=True)
    with pytest.raises(ValueError, match="key must have query's 3 tokens, got 4"):
        sharded.local_attention(
            x[:, :3], x, x, axis_name="sequence", pattern=SlidingWindow(1, 0), is_causal=True
        )
