"""Each function with structured scores against its plain form in `reference.py`, at lengths that no block divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax.attention.structured import reference
from tests.attention.local.test_local import random_qkv
from tests.marks import slow_unless
from tests.oracles import attention as oracles

WIDTH, HEADS = 12, 4


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32) / 2


def levels(heads, seed):
    return [normal(2**level, WIDTH // 2**level, heads, 3 - level, seed=seed) for level in range(3)]


CASES = [
    ("mlr_attention", {"ranks": (4, 2, 2), "block_sizes": (None, 24, 8)}),
    ("mlr_attention", {"ranks": (5, 3), "block_sizes": (40, 10), "divide_by_levels": True}),
    ("bilinear_mlr_attention", {"query_weights": levels(HEADS, 1), "key_weights": levels(2, 2)}),
    ("bilinear_btt_attention", {"right": normal(3, 4, HEADS, 4, 2), "left": normal(HEADS, 4, 3, 3, 2)}),
    ("global_window_attention", {"ranks": (3, 5), "window": 6}),
]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", slow_unless([1, 67, 101], (67,)))
@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_its_plain_form(name, options, length, is_causal):
    arrays = (normal(2, length, WIDTH), normal(2, length, 2, 5))
    if not name.startswith("bilinear"):
        arrays = random_qkv(length, heads=HEADS)[:3]
    function, plain = (getattr(module, name) for module in (brl_jax, reference))
    got, expected = jax.jit(lambda *a: [f(*a, **options, is_causal=is_causal) for f in (function, plain)])(
        *arrays
    )
    assert oracles.relative_error(got, expected) < 1e-5
