"""Biases and masks of compression on the kernels, interpreted on a CPU, against a float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import compress, compress_blocks
from pallas_kernels.tpu.compress.backward import GradientStep
from pallas_kernels.tpu.compress.history import HistoryStep
from tests.marks import slow_unless
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays


def check(
    shape,
    queries,
    bias=None,
    mask=None,
    *,
    dtype=jnp.float32,
    tolerance=1e-5,
    score="softmax",
    contrast=True,
    **options,
):
    """Compares with the reference; `bias` and `mask` are shapes, each axis of which may be 1."""
    batch, length, heads, head_dim = shape
    q, k1, k2, v, g = arrays(
        0, dtype, *[(batch, n, heads, head_dim) for n in (queries, length, length, length, queries)]
    )
    (gamma,) = arrays(1, jnp.float32, (heads,))
    rng = np.random.default_rng(2)
    added = None if bias is None else rng.standard_normal(bias).astype(np.float32)
    seen = np.ones((1, 1, 1, length), bool) if mask is None else rng.random(mask) < 0.6
    if mask is not None:
        seen[:, :, :, :3] = False
        # A key that some queries see must be finite; one that none sees may be anything, but zero for the kernel.
        there = np.broadcast_to(seen.any((1, 2)), (batch, length))[:, :, None, None]
        k1, k2, v = (jnp.where(jnp.asarray(there), x, 0) for x in (k1, k2, v))
    if not contrast:
        k2, gamma = None, None

    @jax.jit
    def both(q, k1, k2, v, gamma, added, g):
        def f(q, k1, k2, v, gamma, added):
            return compress(
                q, k1, k2, v, gamma=gamma, bias=added, mask=None if mask is None else jnp.asarray(seen),
                scale=0.3, score=score, **{"interpret": True} | options,
            )  # fmt: skip

        out, pull = jax.vjp(f, q, k1, k2, v, gamma, added)
        return out, *pull(g)

    got = both(q, k1, k2, v, gamma, None if added is None else jnp.asarray(added), g)
    want = oracle.compress(
        q, k1, k2, v, gamma, 0.3, score, g, seen, bias=None if added is None else added.astype(np.float64)
    )
    if added is not None:
        shared = tuple(axis for axis in range(4) if bias[axis] == 1)
        want = (*want[:-1], want[-1].sum(shared, keepdims=True))
    pairs = [
        (x, y)
        for x, y in zip((x for x in got if x is not None), (y for y in want if y is not None), strict=True)
    ]
    distances = [oracle.distance(x, y) for x, y in pairs]
    assert max(distances) < tolerance, distances


@pytest.mark.parametrize("score", slow_unless(["softmax", "relu2", "laplace"], ("softmax",)))
def test_bias_of_each_pair(score):
    """Two heads in a tile, and a third that has half of one; two parts, whose last block is ragged."""
    check((2, 300, 3, 64), 20, (2, 3, 20, 300), score=score, block=128, splits=3)


@pytest.mark.parametrize(
    ("bias", "mask"),
    slow_unless(
        [
            ((1, 2, 5, 200), None),
            ((1, 1, 1, 200), (2, 1, 1, 200)),
            (None, (2, 1, 1, 200)),
            (None, (1, 2, 1, 200)),
            (None, (2, 1, 5, 200)),
            ((2, 1, 1, 200), (1, 2, 5, 1)),
        ],
        (((1, 2, 5, 200), None), (None, (2, 1, 1, 200)), (None, (1, 2, 1, 200))),
    ),
)
def test_axes_of_one(bias, mask):
    """Batch entries, heads, compressed tokens or keys that share numbers; a mask in lanes where it has no queries."""
    check((2, 200, 2, 64), 5, bias, mask)


@pytest.mark.parametrize("masked", [False, True])
def test_all_keys_share_numbers(masked):
    """They matter to scores that are not normalised."""
    mask = (1, 1, 1, 200) if masked else None
    check((1, 200, 1, 128), 5, (1, 1, 5, 1), mask, score="relu2", contrast=False)


@pytest.mark.parametrize("score", slow_unless(["softmax", "laplace"], ("softmax",)))
@pytest.mark.parametrize(
    ("bias", "mask"),
    slow_unless(
        [((1, 1, 20, 1100), (1, 1, 1, 1100)), ((1, 1, 1, 1100), None), (None, None)],
        (((1, 1, 20, 1100), (1, 1, 1, 1100)),),
    ),
)
def test_blocks_in_several_strips(bias, mask, score):
    """Four strips in the forward kernel and two in the backward one; the last block is ragged."""
    check((1, 1100, 1, 128), 20, bias, mask, score=score, block=1024, chip="v5e")


def test_bfloat16_and_a_single_attention():
    check(
        (1, 256, 1, 128),
        130,
        (1, 1, 130, 256),
        (1, 1, 1, 256),
        dtype=jnp.bfloat16,
        tolerance=1e-2,
        contrast=False,
    )


@pytest.mark.slow
def test_poisoned_memory_and_any_order(hostile):
    check((1, 300, 2, 64), 4, (1, 2, 4, 300), (1, 1, 1, 300), block=128, splits=3, interpret=hostile)


@pytest.mark.parametrize(
    ("block_size", "history", "head_dim"),
    slow_unless([(128, 128, 64), (16, 40, 64), (144, 300, 64), (256, 400, 128)], ((16, 40, 64),)),
)
def test_bias_of_every_block(block_size, history, head_dim, hostile, monkeypatch):
    """All blocks share the bias: its gradient is the sum over batch and blocks, whose steps run in order. The largest
    blocks have two strips."""
    for step in (HistoryStep, GradientStep):
        monkeypatch.setattr(step, "strip", 128)
    blocks, heads, count = 3, 2, 4
    length = history + (blocks - 1) * block_size
    lengths = np.minimum(history, np.arange(blocks) * block_size + np.asarray([[0], [3]]))
    k1, k2, v = arrays(0, jnp.float32, *[(2, length, heads, head_dim)] * 3)
    q, g = (
        arrays(n, jnp.float32, (2 * blocks, count, heads, head_dim))[0].reshape(
            2, blocks, count, heads, head_dim
        )
        for n in (4, 5)
    )
    gamma, bias = arrays(6, jnp.float32, (heads,), (heads, count, history))

    @jax.jit
    def both(q, k1, k2, v, gamma, bias, g):
        f = lambda q, k1, k2, v, gamma, bias: compress_blocks(  # noqa: E731
            q, k1, k2, v, gamma=gamma, bias=bias, scale=0.4, block_size=block_size, history_size=history,
            history_lengths=jnp.asarray(lengths, jnp.int32), interpret=hostile,
        )  # fmt: skip
        out, pull = jax.vjp(f, q, k1, k2, v, gamma, bias)
        return out, *pull(g)

    got = both(q, k1, k2, v, gamma, bias, g)
    total = [np.zeros(x.shape) for x in got]
    q, k1, k2, v, gamma, bias, g = (np.asarray(x) for x in (q, k1, k2, v, gamma, bias, g))
    for i, b in np.ndindex(2, blocks):
        stop, here = b * block_size + history, lengths[i, b]
        if here == 0:
            continue
        one, part, late = slice(i, i + 1), slice(stop - here, stop), slice(history - here, history)
        out, gq, *rest, ggamma, gbias = oracle.compress(
            q[one, b],
            k1[one, part],
            k2[one, part],
            v[one, part],
            gamma,
            0.4,
            "softmax",
            g[one, b],
            bias=bias[None, :, :, late],
        )
        total[0][one, b], total[1][one, b] = out, gq
        for whole, x in zip(total[2:5], rest):
            whole[one, part] += x
        total[5] += ggamma
        total[6][:, :, late] += gbias[0]
    assert max(oracle.distance(x, y) for x, y in zip(got, total)) < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"bias": jnp.zeros((1, 2, 5, 300))},
            r"bias must broadcast to \(1, 2, 16, 300\), got shape",
        ),
        ({"mask": jnp.ones((16, 300), bool)}, r"mask must broadcast to .* got shape \(16, 300\)"),
    ],
)
def test_bad_input(change, words):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.float32) for n in (16, 300))
    f = functools.partial(compress, gamma=None, **change)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda q, k: f(q, k, None, k), q, k)
