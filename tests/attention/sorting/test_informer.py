"""ProbSparse attention: its blocks, its budgets and its samples."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import informer_attention, init_informer_state
from brl_jax.attention.sorting import informer
from tests.oracles import sorting
from tests.oracles.attention import relative_error
from tests.support.attention import random_qkv

KEY = jax.random.key(0)


@pytest.mark.slow
def test_blocks_of_ranks_and_of_attending_queries_change_nothing(monkeypatch):
    arrays = random_qkv(150, heads=4)[:3]
    options = {"factor": 2, "is_causal": True, "rng": KEY, "scale": 0.3}
    expected = [sorting.informer(*map(np.float64, row), **options) for row in zip(*arrays)]
    monkeypatch.setattr(informer, "_RANKED", 16)
    monkeypatch.setattr(informer, "_QUERY_BLOCK", 8)
    assert relative_error(informer_attention(*arrays, **options), expected) < 1e-5


def test_budgets():
    """For ints and arrays, near powers of e."""
    lengths = [1, 2, 3, 7, 8, 20, 21, 22026, 22027, 2**24]
    logarithms = [max(1, math.ceil(math.log(n))) for n in lengths]
    assert [informer.log_ceiling(n) for n in lengths] == logarithms
    np.testing.assert_array_equal(informer.log_ceiling(jnp.asarray(lengths)), logarithms)
    assert informer.budget(4096, 5) == 45
    assert informer.budget(20, 5) == 15
    assert informer.budget(6, 5) == 6
    np.testing.assert_array_equal(informer.budget(jnp.asarray([4096, 20, 6]), 5), [45, 15, 6])
    # All of the first tokens may attend.
    assert all(informer.capacity(n, 5) >= n for n in range(1, 30))


def test_samples_are_uniform_and_of_the_position_alone():
    draw = jax.jit(informer.sampled_fractions)
    drawn = np.asarray(draw(KEY, jnp.arange(2000), 3))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.03
    np.testing.assert_array_equal(draw(KEY, jnp.arange(2000) + 7, 3)[:-7], drawn[7:])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(draw(KEY, jnp.arange(2000), 3), drawn)
    for other in (draw(KEY, jnp.arange(2000), 4), draw(jax.random.key(1), jnp.arange(2000), 3)):
        assert (np.asarray(other) != drawn).mean() > 0.99


@pytest.mark.slow
def test_tokens_that_do_not_exist_leave_no_trace():
    arrays = random_qkv(12)[:3]
    options = {"factor": 1, "is_causal": True, "rng": KEY}
    expected = informer_attention(*arrays, **options)
    step = jax.jit(functools.partial(informer_attention, **options, return_state=True))
    state = init_informer_state(2, 2, 8, length=12, num_heads=4, factor=1)
    _, state = step(*(x[:, :7] for x in arrays), state=state, count=jnp.int32(4))
    out, _ = step(*(x[:, 4:] for x in arrays), state=state)
    assert relative_error(out, expected[:, 4:]) < 1e-5
