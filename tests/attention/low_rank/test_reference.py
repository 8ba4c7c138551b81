"""Each function of low rank against its plain form in `reference.py`, at lengths that nothing divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax.attention.low_rank import reference
from tests.attention.local.test_local import assert_close, random_qkv


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


SAMPLES = jnp.asarray(np.random.default_rng(0).random(20), jnp.float32)
# The name of the function, its options, and further ones that its plain form lacks.
CASES = [
    ("nystrom_attention", {"num_landmarks": 7}, {}),
    (
        "nystrom_attention",
        {"num_landmarks": 64, "iterations": 3, "scale": 0.2, "value_kernel": normal(4, 5)},
        {},
    ),
    # Twelve steps, because the plain form has the exact inverse.
    ("skyformer_attention", {"samples": SAMPLES}, {"iterations": 12}),
    ("skyformer_attention", {"samples": SAMPLES[:5], "ridge": 0.5, "scale": 0.2}, {"iterations": 12}),
]


@pytest.mark.parametrize("length", [1, 67])
@pytest.mark.parametrize(("name", "options", "own"), CASES)
def test_equals_its_plain_form(name, options, own, length):
    arrays = random_qkv(length, heads=4)[:3]
    function, plain = (getattr(module, name) for module in (brl_jax, reference))
    got, expected = jax.jit(lambda *a: (function(*a, **options, **own), plain(*a, **options)))(*arrays)
    assert_close([got], [expected], 1e-4)
