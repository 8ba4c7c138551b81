"""Compression in float64 NumPy, written from equations 8-12, and the comparison of a function with it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tests.laws.networks import relative_error
from tests.oracles.parts import sigma

SCORES = ["softmax", "relu2", "laplace"]


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def oracle_compress(q, k1, k2, v, gamma, scale, score, bias=None, mask=None):
    """One batch entry at a time, one head at a time; analytic, so that complex steps give derivatives."""
    batch, m, heads, _ = q.shape
    s = k1.shape[1]
    bias = np.zeros((1, 1, 1, 1)) if bias is None else bias
    bias = np.broadcast_to(bias, (batch, heads, m, s))
    mask = np.broadcast_to(True if mask is None else mask, (batch, heads, m, s))
    operands = [a for a in (q, k1, k2, v, gamma, bias) if a is not None]
    out = np.zeros(q.shape, np.result_type(*operands))
    for b in range(batch):
        for n in range(heads):
            w = sigma(q[b, :, n] @ k1[b, :, n].T * scale + bias[b, n], mask[b, n], score)
            if k2 is not None:
                w = w - gamma[n] * sigma(q[b, :, n] @ k2[b, :, n].T * scale + bias[b, n], mask[b, n], score)
            out[b, :, n] = w @ v[b, :, n]
    return out


def check(function, oracle, operands, tolerance=1e-4):
    """The output, and the gradient of a random weighting of it along a random direction of each operand."""
    rng = np.random.default_rng(1)
    expected = oracle(*operands)
    weight = rng.standard_normal(expected.shape)

    def output_and_gradients(*xs):
        out, pull = jax.vjp(function, *xs)
        return out, pull(jnp.asarray(weight, jnp.float32))

    out, grads = jax.jit(output_and_gradients)(*(jnp.asarray(x, jnp.float32) for x in operands))
    assert relative_error(out, expected) < 1e-5
    for i, grad in enumerate(grads):
        direction = rng.standard_normal(operands[i].shape)
        stepped = [x + 1e-30j * direction if j == i else x for j, x in enumerate(operands)]
        expected = np.imag((oracle(*stepped) * weight).sum()) / 1e-30
        grad = np.asarray(grad, np.float64)
        scale = np.linalg.norm(grad) * np.linalg.norm(direction) / math.sqrt(direction.size)
        assert abs((grad * direction).sum() - expected) <= tolerance * max(scale, abs(expected)), i
