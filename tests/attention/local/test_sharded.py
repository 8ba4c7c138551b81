"""Attention on sequences that are cut over four devices: the same numbers as on one, and what travels between them."""

import functools

import numpy as np
import pytest

from brl_jax import SlidingWindow, Strided
from brl_jax.attention.local import sharded
from tests.attention.local.stretches import CASES
from tests.marks import slow_unless

# Fast: neighbours that send what windows reach, blocks and histories over several stretches, and sums over all devices.
FAST = (
    "window over several stretches, packed",
    "both sides, padded",
    "blocks that no stretch holds",
    "compress, padded",
    "history over several stretches",
)

pytestmark = pytest.mark.xdist_group("devices")


@pytest.fixture
def result(devices):
    return functools.partial(devices.ask, "tests.attention.local.stretches")


@pytest.mark.parametrize("name", slow_unless(CASES, FAST))
def test_results_and_gradients_are_those_of_one_device(result, name):
    if result(name) is None:
        pytest.skip("JAX 0.12 can look at a kernel neither under shard_map nor, sharing a result, under vmap")
    whole, stretches = result(name)
    for expected, got in zip(whole, stretches, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
        assert np.abs(expected).max() > 0.01


def test_only_the_window_travels(result):
    """Of the 1024 keys and values (16 numbers each) on a device, only the 15 that a window reaches are sent."""
    kinds = {kind for kind, _ in result("travelled")}
    assert kinds == {"collective-permute"}
    assert max(size for _, size in result("travelled")) <= 2 * 15 * 16


def test_on_a_tpu_a_short_halo_takes_the_kernel_for_windows(result):
    near, far = result("kernels")
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
