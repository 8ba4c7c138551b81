"""Layers with structured scores: their defaults, caches and errors (their mathematics: tests/laws)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BilinearBTTConfig, BilinearMLRConfig, Dimensions, GlobalWindowConfig, MLRConfig
from brl_jax.structured import rms_limit
from tests.support.generation import in_pieces


def dimensions(width=64, heads=4, kv_heads=2, **changes):
    return Dimensions(width, heads, kv_heads, width // heads, width, is_causal=True, **changes)


def test_default_ranks():
    assert MLRConfig().level_ranks(64) == (32, 8, 8, 8, 4, 4)
    assert [MLRConfig().level_ranks(size) for size in (16, 20, 7, 1)] == [
        (8, 2, 2, 2, 1, 1), (10, 10), (4, 3), (1,)
    ]  # fmt: skip
    for width, heads in ((64, 4), (64, 8), (96, 8), (256, 4), (32, 1), (36, 4)):
        ranks = BilinearMLRConfig().level_ranks(dimensions(width, heads, 1))
        assert sum(ranks) == width // heads
        assert width % 2 ** (len(ranks) - 1) == 0
        full_rank = sum(rank * 2**level for level, rank in enumerate(ranks)) >= width
        assert full_rank == ((width, heads) != (36, 4)), (width, heads, ranks)


@pytest.mark.slow
def test_sizes_that_grow_with_the_sequence():
    """In generation the length of the cache sets the sizes: a full cache gives the outputs of training."""
    d = dimensions(16, 4, 2)
    layer = MLRConfig(ranks=(2, 1, 1), context=None).layer(d)
    x = jax.random.normal(jax.random.key(0), (2, 12, 16))
    variables = nn.unbox(jax.jit(layer.init)(jax.random.key(1), x))
    expected, _, _ = jax.jit(layer.apply)(variables, x)
    outputs, cache = in_pieces(layer, variables, x, (7, 1, 1, 1, 1, 1))
    assert [keys.shape[2] for keys in cache.keys] == [12, 6, 3]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    fixed = MLRConfig(ranks=(2, 1, 1), context=48).layer(d)
    assert np.abs(jax.jit(fixed.apply)(variables, x)[0] - expected).max() > 1e-4


def test_other_caches():
    d = dimensions()
    split = GlobalWindowConfig(window=6, ranks=(6, 10)).layer(d).init_cache(3, 40)
    shapes = [array.shape for array in (split.past.key, split.window_key, split.past.value)]
    assert shapes == [(3, 40, 2, 6), (3, 5, 2, 10), (3, 40, 2, 16)]
    assert BilinearBTTConfig().layer(d).init_cache(3, 40).key.shape == (3, 40, 4, 64)
    ranks = BilinearMLRConfig(ranks=(8, 8))
    assert ranks.layer(d).init_cache(3, 40).key.shape == (3, 40, 2, 8 + 16)


def test_weights_start_at_their_limit():
    """The bilinear weights are initialized with RMS_0, so the limit has no effect at first."""
    layer = BilinearBTTConfig(rank=2).layer(dimensions())
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(0), jnp.ones((1, 3, 64))))["params"]
    assert params["right"].shape == (8, 8, 4, 8, 2)
    assert params["left"].shape == (4, 8, 8, 8, 2)
    for name, fans in (("right", (8, 64)), ("left", (16, 8))):
        rms = float(jnp.sqrt(jnp.mean(params[name] ** 2)))
        assert rms == pytest.approx(rms_limit(*fans), rel=0.1)
