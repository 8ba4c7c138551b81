"""The propagation kernels, interpreted on a CPU, against a float64 reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import propagate
from tests.marks import slow_unless
from tests.oracles import kernels as oracle
from tests.pallas_kernels.tpu.inputs import arrays
from tests.support.attention import pulled


def check(shape, keys, score, dtype, tolerance, **options):
    batch, _, heads, head_dim = shape
    q, k, v, g = arrays(
        0, dtype, shape, (batch, keys, heads, head_dim), (batch, keys, heads, head_dim), shape, spread=1.0
    )
    (strength,) = arrays(1, jnp.float32, (heads,))

    def f(q, k, v, strength):
        return propagate(q, k, v, strength=strength, score=score, **{"interpret": True} | options)

    got = pulled(f, g, q, k, v, strength)
    want = oracle.propagate(q, k, v, strength, options.get("scale", head_dim**-0.5), score, g)
    oracle.check(got, want, tolerance)


@pytest.mark.parametrize("score", ["softmax", "relu2", "laplace"])
def test_matches_reference_in_float32(score):
    check((2, 301, 2, 128), 70, score, jnp.float32, 1e-5, block=256)


@pytest.mark.parametrize(
    ("score", "shape", "bias", "dtype", "tolerance"),
    slow_unless(
        [
            ("softmax", (2, 301, 3, 64), (2, 3, 301, 20), jnp.float32, 1e-5),
            ("softmax", (2, 301, 2, 64), (1, 1, 1, 20), jnp.bfloat16, 1e-2),
            ("relu2", (1, 150, 2, 128), (1, 2, 150, 20), jnp.float32, 1e-5),
            ("laplace", (2, 150, 4, 32), (1, 4, 150, 1), jnp.float32, 1e-5),
        ],
        (("softmax", (2, 301, 3, 64), (2, 3, 301, 20), jnp.float32, 1e-5),),
    ),
)
def test_bias(score, shape, bias, dtype, tolerance):
    """A row of the bias hides all keys, and gives 0; the last block is incomplete."""
    batch, _, heads, head_dim = shape
    q, k, v, g = arrays(0, dtype, shape, *[(batch, 20, heads, head_dim)] * 2, shape)
    strength, numbers = arrays(1, jnp.float32, (heads,), bias)
    if bias[2] > 1:
        numbers = numbers.at[:, :, 7].set(-jnp.inf)

    def f(q, k, v, strength, bias):
        return propagate(q, k, v, strength=strength, bias=bias, score=score, block=256, interpret=True)

    got = pulled(f, g, q, k, v, strength, numbers)
    seen = np.isfinite(np.asarray(numbers))
    added = np.where(seen, np.asarray(numbers, np.float64), 0.0)
    want = oracle.propagate(q, k, v, strength, head_dim**-0.5, score, g, seen=seen, bias=added)
    shared = tuple(axis for axis in range(4) if bias[axis] == 1)
    want = (*want[:-1], want[-1].sum(shared, keepdims=True))
    oracle.check(got, want, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 300, 3, 64), (1, 150, 4, 32), (1, 40, 1, 80), (1, 1, 1, 256)])
def test_head_dims(shape):
    check(shape, 16, "softmax", jnp.float32, 1e-5)


def test_matches_reference_in_bfloat16():
    check((1, 280, 2, 64), 128, "softmax", jnp.bfloat16, 1e-2)


@pytest.mark.slow
def test_poisoned_memory_and_any_order(hostile):
    check((1, 300, 2, 128), 9, "softmax", jnp.float32, 1e-5, block=128, interpret=hostile)
