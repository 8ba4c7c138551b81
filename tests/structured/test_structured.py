"""Structured matrices against NumPy matrices assembled from their parameters, entry by entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.structured import (
    BTT,
    MLBTC,
    MLR,
    BlockContraction,
    BlockLowRank,
    Butterfly,
    Kronecker,
    LowRank,
    Monarch,
    limit_rms,
    rms_limit,
)
from brl_jax.structured.mlbtc import ContractionSizes
from tests.marks import slow_unless

KEY = jax.random.key(3)
# Rectangular if the family allows it. name: (matrix, shape, parameters, rank)
MATRICES = {
    "low_rank": (lambda: LowRank.init(KEY, 12, 18, 4), (12, 18), 30 * 4, 4),
    "block_low_rank": (lambda: BlockLowRank.init(KEY, 12, 18, 3, 2), (12, 18), 30 * 2, 6),
    "mlr": (lambda: MLR.init(KEY, 12, 16, (2, 1, 1)), (12, 16), 28 * 4, 8),
    "monarch": (lambda: Monarch.init(KEY, (3, 4), (2, 8)), (12, 16), 24 + 64, 8),
    "kronecker": (lambda: Kronecker.init(KEY, (3, 4), (2, 8)), (12, 16), 6 + 32, 8),
    "butterfly": (lambda: Butterfly.init(KEY, 32), (32, 32), 2 * 32 * 5, 32),
    "btt": (lambda: BTT.init(KEY, (3, 4), (2, 8), 2), (12, 16), 48 + 128, 12),
    "mlbtc": (
        lambda: MLBTC.init(
            KEY,
            (
                ContractionSizes(1, 4, 3, 2, 1, 8),
                ContractionSizes(2, 2, 3, 4, 1, 2),
                ContractionSizes(4, 1, 3, 1, 2, 4),
            ),
        ),
        (12, 16),
        24 + 64 + 48 + 32 + 24 + 32,
        12,
    ),
}


@functools.cache
def matrix_of(name):
    return MATRICES[name][0]()


def to_numpy(x):
    return np.asarray(x, np.float64)


def contraction(left, right):
    """(p, b, a, c, t) and (p, c, e, b, t) as a dense matrix, entry by entry."""
    left, right = to_numpy(left), to_numpy(right)
    p, b, a, c, t = left.shape
    e = right.shape[2]
    dense = np.zeros((p * a * b, p * c * e))
    for i, j, k, m, n in np.ndindex(p, a, b, c, e):
        entry = sum(left[i, k, j, m, s] * right[i, m, n, k, s] for s in range(t))
        dense[(i * a + j) * b + k, (i * c + m) * e + n] = entry
    return dense


def butterfly(factors):
    factors = to_numpy(factors)
    size = 2 ** len(factors)
    dense = np.eye(size)
    for i, pairs in enumerate(factors):
        factor, free = np.zeros((size, size)), [j for j in range(size) if not j >> i & 1]
        for pair, j in zip(pairs, free):
            both = [j, j + 2**i]
            factor[np.ix_(both, both)] = pair
        dense = factor @ dense
    return dense


def blocks(parts):
    rows, columns = (sum(part.shape[axis] for part in parts) for axis in (0, 1))
    dense, row, column = np.zeros((rows, columns)), 0, 0
    for part in parts:
        dense[row : row + part.shape[0], column : column + part.shape[1]] = part
        row, column = row + part.shape[0], column + part.shape[1]
    return dense


def low_rank(m):
    return to_numpy(m.left) @ to_numpy(m.right).T


def block_low_rank(m):
    return blocks([to_numpy(x) @ to_numpy(y).T for x, y in zip(m.left, m.right)])


ORACLES = {
    "low_rank": low_rank,
    "block_low_rank": block_low_rank,
    "mlr": lambda m: sum(block_low_rank(level) for level in m.levels),
    "monarch": lambda m: contraction(m.left[None, ..., None], m.right.swapaxes(1, 2)[None, ..., None]),
    "kronecker": lambda m: np.kron(to_numpy(m.left), to_numpy(m.right)),
    "butterfly": lambda m: butterfly(m.factors),
    "btt": lambda m: contraction(m.left[None], m.right[None]),
    "mlbtc": lambda m: sum(contraction(level.left, level.right) for level in m.levels),
}


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MATRICES)
def test_equals_its_definition(name):
    """The dense form, products and bilinear forms, also written as block tensor contractions."""
    matrix, (_, shape, parameters, rank) = matrix_of(name), MATRICES[name]
    dense = ORACLES[name](matrix)
    assert matrix.shape == matrix.as_mlbtc().shape == dense.shape == shape
    assert matrix.num_parameters == parameters
    x, y = (np.random.default_rng(size).standard_normal((2, 3, size)).astype(np.float32) for size in shape)

    @jax.jit
    def run(matrix, x, y):
        general = matrix.as_mlbtc()
        return [(m.to_dense(), m.matmul(y), m.bilinear(x, y)) for m in (matrix, general)]

    for whole, product, form in run(matrix, jnp.asarray(x), jnp.asarray(y)):
        close(whole, dense)
        close(product, y @ dense.T)
        close(form, np.einsum("...i,ij,...j->...", x, dense, y))
    assert np.linalg.matrix_rank(dense, tol=1e-6) == matrix.rank == rank


@pytest.mark.parametrize("name", slow_unless(MATRICES, ("mlr", "btt")))
def test_flops_equal_the_products(name):
    """As the compiler counts them, apart from sums of levels; fewer than the dense product's at a realistic width."""
    matrix = matrix_of(name)
    # A batch turns them into matrix products, which the compiler counts as two operations per pair.
    y = jnp.ones((64, matrix.shape[1]), jnp.float32)
    counted = jax.jit(lambda m, y: m.matmul(y)).lower(matrix, y).compile().cost_analysis()["flops"]
    levels = len(matrix.as_mlbtc().levels)
    # Some products of single numbers need no addition; sums of levels add one per row.
    assert 0.5 * 64 * matrix.flops <= counted <= 64 * (matrix.flops + levels * matrix.shape[0])


def test_cheaper_than_dense_at_full_rank():
    """A BTT of rank 1 and a butterfly of width 256 have full rank with far fewer numbers."""
    # A product of eight random factors is too close to singular for float32; a product of rotations is orthogonal.
    angle = jax.random.uniform(KEY, (8, 128), jnp.float32, 0, 2 * np.pi)
    turns = jnp.stack([jnp.cos(angle), -jnp.sin(angle), jnp.sin(angle), jnp.cos(angle)], -1)
    for matrix in (BTT.init(KEY, (16, 16), (16, 16), 1), Butterfly(turns.reshape(8, 128, 2, 2))):
        assert matrix.rank == 256
        assert np.linalg.matrix_rank(np.asarray(matrix.to_dense())) == 256
        assert matrix.num_parameters <= 256**2 / 8
        assert matrix.flops <= 2 * 256**2 / 8


def test_gradients_flow_through_the_pytree():
    matrix, target = matrix_of("btt"), jnp.ones((12,), jnp.float32)
    y = jnp.asarray(np.random.default_rng(0).standard_normal(16), jnp.float32)
    gradient = jax.grad(lambda m: jnp.sum(jnp.square(m.matmul(y) - target)))(matrix)
    assert type(gradient) is BTT
    direction = BTT(jnp.ones_like(matrix.left), jnp.ones_like(matrix.right))
    dense = functools.partial(contraction)
    error = dense(matrix.left[None], matrix.right[None]) @ to_numpy(y) - 1

    def moved(step):
        return dense(matrix.left[None] + step, matrix.right[None] + step) @ to_numpy(y) - 1

    slope = ((moved(1e-4) ** 2).sum() - (moved(-1e-4) ** 2).sum()) / 2e-4
    assert np.abs(error).max() > 0.1
    got = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction)))
    assert float(got) == pytest.approx(slope, rel=1e-2)


def test_maps_over_heads():
    """vmap maps over a pytree of stacked parameters, with one matrix per head."""
    heads = [BTT.init(key, (3, 4), (2, 8), 1) for key in jax.random.split(KEY, 5)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *heads)
    y = jnp.ones((7, 16), jnp.float32)
    got = jax.vmap(lambda m: m.matmul(y))(stacked)
    close(got, np.stack([y @ np.asarray(m.to_dense()).T for m in heads]))


def test_weights_are_drawn_with_and_limited_to_their_rms():
    weight = BTT.init(KEY, (16, 16), (16, 16), 2).left
    fans = (32, 16)
    rms = float(jnp.sqrt(jnp.mean(weight**2)))
    assert rms == pytest.approx(rms_limit(*fans), rel=0.05)
    assert rms_limit(*fans) == pytest.approx(np.sqrt(16 / 32**2))
    large = limit_rms(7 * weight, *fans)
    assert float(jnp.sqrt(jnp.mean(large**2))) == pytest.approx(rms_limit(*fans), rel=1e-5)
    np.testing.assert_array_equal(limit_rms(0.1 * weight, *fans), 0.1 * weight)
    zero = jax.grad(lambda w: jnp.sum(limit_rms(w, *fans)))(jnp.zeros((3, 3)))
    np.testing.assert_array_equal(zero, np.ones((3, 3)))


def test_bad_arguments():
    x = jnp.ones((2, 5))
    with pytest.raises(ValueError, match="x must be vectors of length 16, the number of columns"):
        matrix_of("btt").matmul(x)
    with pytest.raises(ValueError, match="x must be vectors of length 12, the number of rows"):
        matrix_of("btt").bilinear(x, jnp.ones((2, 16)))
    with pytest.raises(ValueError, match="left and right must have the same rank, got 2 and 3"):
        LowRank(jnp.ones((4, 2)), jnp.ones((5, 3))).matmul(x)
    with pytest.raises(ValueError, match="left must have axes"):
        BTT(jnp.ones((4, 2)), jnp.ones((2, 8, 4, 2))).matmul(x)
    with pytest.raises(ValueError, match="blocks must divide rows and columns, 12 and 16, got 3"):
        BlockLowRank.init(KEY, 12, 16, 3, 1)
    with pytest.raises(ValueError, match="size must be a power of two"):
        Butterfly.init(KEY, 12)
    two = (BlockContraction(jnp.ones((1, 1, rows, 1, 1)), jnp.ones((1, 1, 5, 1, 1))) for rows in (2, 3))
    with pytest.raises(ValueError, match="levels must be one or more matrices of the same shape"):
        MLBTC(tuple(two)).matmul(x)
