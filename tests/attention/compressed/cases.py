"""Inputs for compression, and a comparison of functions with their float64 references."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from tests.laws.networks import relative_error
from tests.support.attention import pulled

SCORES = ["softmax", "relu2", "laplace"]


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def check(function, oracle, operands, tolerance=1e-4):
    """Compares the output, and directional derivatives of a random weighting of it for each operand."""
    rng = np.random.default_rng(1)
    expected = oracle(*operands)
    weight = rng.standard_normal(expected.shape)
    out, *grads = pulled(function, *(jnp.asarray(x, jnp.float32) for x in (weight, *operands)))
    assert relative_error(out, expected) < 1e-5
    for i, grad in enumerate(grads):
        direction = rng.standard_normal(operands[i].shape)
        stepped = [x + 1e-30j * direction if j == i else x for j, x in enumerate(operands)]
        expected = np.imag((oracle(*stepped) * weight).sum()) / 1e-30
        grad = np.asarray(grad, np.float64)
        scale = np.linalg.norm(grad) * np.linalg.norm(direction) / math.sqrt(direction.size)
        assert abs((grad * direction).sum() - expected) <= tolerance * max(scale, abs(expected)), i
