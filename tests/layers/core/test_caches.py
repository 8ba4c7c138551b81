"""Contents of decoding caches after tokens are written, at every position and with missing tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.state import KeyValueCache, slide, window_segments, write_tokens
from brl_jax.layers import MECHANISMS, Dimensions


def numbered(start, length):
    """Tokens (1, length, 1, 2) whose entries are their positions, counted from 1."""
    return jnp.broadcast_to(
        (start + 1.0 + np.arange(length, dtype=np.float32))[None, :, None, None], (1, length, 1, 2)
    )


@pytest.mark.parametrize("traced", [False, True])
def test_tokens_stand_at_their_positions(traced):
    append = KeyValueCache.append
    append = jax.jit(append) if traced else append
    cache = KeyValueCache.empty((1, 8, 1, 2), (1, 8, 1, 2), jnp.float32)
    cache = append(cache, numbered(0, 3), -numbered(0, 3))
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
    ):  # a scan carries the cache, so types must stay
        cache = append(cache, numbered(3, 4), -numbered(3, 4), jnp.int64(2))
    assert int(cache.length) == 5
    assert cache.length.dtype == jnp.int32
    expected = np.where(np.arange(8) < 5, 1.0 + np.arange(8), 0.0)
    np.testing.assert_array_equal(cache.key[0, :, 0, 0], expected)
    np.testing.assert_array_equal(cache.value[0, :, 0, 1], -expected)


def test_first_caches_can_be_donated():
    """A caller who gives each cache up gives up the first one too, so it must not hold one array twice."""
    dimensions = Dimensions(16, 2, 1, 8, 16, is_causal=True)
    for name, kind in MECHANISMS.items():
        mechanism = kind(hidden=0) if name == "tlinformer" else kind()
        if mechanism.decodes:
            cache = mechanism.layer(dimensions).init_cache(1, 8)
            jax.block_until_ready(jax.jit(lambda cache: cache, donate_argnums=0)(cache))


@pytest.mark.parametrize("name", ["full", "local", "synthesizer", "linear"])
def test_a_count_of_64_bits_leaves_a_layers_cache_as_it_was(name):
    layer = MECHANISMS[name]().layer(Dimensions(16, 2, 1, 8, 16, is_causal=True))

    def step(x, cache, count):
        return layer.init_with_output(jax.random.key(0), x, cache=cache, count=count)[0][2]

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        cache, x = layer.init_cache(1, 8), jnp.zeros((1, 2, 16), jnp.float32)
        found = jax.eval_shape(step, x, cache, jnp.int64(1))
    assert jax.tree.map(jnp.result_type, found) == jax.tree.map(jnp.result_type, cache)


def test_tokens_that_do_not_exist_may_reach_over_the_end():
    cache = write_tokens(jnp.zeros((1, 1, 4, 2)), jnp.swapaxes(numbered(0, 3), 1, 2), 2, jnp.int32(1))
    np.testing.assert_array_equal(cache[0, 0, :, 0], [0, 0, 1, 0])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_window_slides_by_the_tokens_that_exist(count):
    both, last = slide(numbered(0, 4), numbered(4, 3), jnp.int32(count))
    np.testing.assert_array_equal(both[0, :, 0, 0], 1 + np.arange(7))
    np.testing.assert_array_equal(last[0, :, 0, 0], 1 + count + np.arange(4))


@pytest.mark.parametrize(
    ("start", "seen"), [(0, [0, 0, 0, 1, 1]), (2, [0, 1, 1, 1, 1]), (7, [1, 1, 1, 1, 1])]
)
def test_unfilled_places_of_a_window_are_a_separate_segment(start, seen):
    queries, keys = window_segments(2, 2, 3, jnp.int32(start))
    np.testing.assert_array_equal(queries, np.ones((2, 2)))
    np.testing.assert_array_equal(keys, [seen, seen])
