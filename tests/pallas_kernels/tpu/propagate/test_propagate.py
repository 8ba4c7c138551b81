"""The propagation kernels, interpreted on a CPU, against a float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import propagate
from tests.marks import slow_unless
from tests.pallas_kernels import oracle
from tests.pallas_kernels.tpu.inputs import arrays


def check(shape, keys, score, dtype, tolerance, **options):
    batch, _, heads, head_dim = shape
    q, k, v, g = arrays(
        0, dtype, shape, (batch, keys, heads, head_dim), (batch, keys, heads, head_dim), shape, spread=1.0
    )
    (strength,) = arrays(1, jnp.float32, (heads,))

    @jax.jit
    def run(q, k, v, strength, g):
        f = functools.partial(propagate, score=score, **{"interpret": True} | options)
        out, pull = jax.vjp(lambda q, k, v, s: f(q, k, v, strength=s), q, k, v, strength)
        return out, *pull(g)

    got = run(q, k, v, strength, g)
    want = oracle.propagate(q, k, v, strength, options.get("scale", head_dim**-0.5), score, g)
    distances = [oracle.distance(x, y) for x, y in zip(got, want)]
    assert max(distances) < tolerance, distances


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

    @jax.jit
    def run(q, k, v, strength, numbers, g):
        f = functools.partial(propagate, score=score, block=256, interpret=True)
        out, pull = jax.vjp(lambda q, k, v, s, b: f(q, k, v, strength=s, bias=b), q, k, v, strength, numbers)
        return out, *pull(g)

    got = run(q, k, v, strength, numbers, g)
    seen = np.isfinite(np.asarray(numbers))
    added = np.where(seen, np.asarray(numbers, np.float64), 0.0)
    want = oracle.propagate(q, k, v, strength, head_dim**-0.5, score, g, seen=seen, bias=added)
    shared = tuple(axis for axis in range(4) if bias[axis] == 1)
    want = (*want[:-1], want[-1].sum(shared, keepdims=True))
    distances = [oracle.distance(x, y) for x, y in zip(got, want, strict=True)]
    assert max(distances) < tolerance, distances


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 300, 3, 64), (1, 150, 4, 32), (1, 40, 1, 80), (1, 1, 1, 256)])
def test_head_dims(shape):
    check(shape, 16, "softmax", jnp.float32, 1e-5)


def test_matches_reference_in_bfloat16():
    check((1, 280, 2, 64), 128, "softmax", jnp.bfloat16, 1e-2)


@pytest.mark.slow
def test_poisoned_memory_and_any_order(hostile):
    check((1, 300, 2, 128), 9, "softmax", jnp.float32, 1e-5, block=128, interpret=hostile)


@pytest.mark.parametrize(
    ("keys", "options", "words"),
    [
        (16, {"score": "cosine"}, "score must be one of softmax, relu2, laplace, got 'cosine'"),
        (16, {"block": 100}, "block must be a positive multiple of 128, got 100"),
        (
            16,
            {"strength": jax.ShapeDtypeStruct((3,), jnp.float32)},
            r"strength must have shape \(2,\), got \(3,\)",
        ),
    ],
)
def test_bad_input(keys, options, words):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.float32) for n in (300, keys))
    strength = options.pop("strength", jnp.ones((2,)))
    f = functools.partial(propagate, **options)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda q, k, v, s: f(q, k, v, strength=s), q, k, k, strength)
