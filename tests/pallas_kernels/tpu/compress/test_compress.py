"""The compression kernels, interpreted on a CPU, against a float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import compress, compress_blocks
from tests.marks import slow_unless
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays


def run(f, dtype, query_shape, shape, contrast=True, poison=None):
    """Arguments, then (output, gradients of query, key, contrast, value, gamma) of f."""
    q, k1, k2, v, g = arrays(0, dtype, query_shape, shape, shape, shape, query_shape, spread=1.0)
    (gamma,) = arrays(1, jnp.float32, shape[2:3])
    given = (q, k1, k2, v, gamma) if contrast else (q, k1, v)
    if poison is not None:
        given = tuple(jnp.where(poison, jnp.nan, x) if x.shape == shape else x for x in given)

    def call(*given):
        if contrast:
            q, k1, k2, v, gamma = given
            return f(q, k1, k2, v, gamma=gamma)
        q, k1, v = given
        return f(q, k1, None, v, gamma=None)

    @jax.jit
    def both(given, g):
        out, pull = jax.vjp(call, *given)
        return out, *pull(g)

    return (q, k1, k2, v, gamma, g), both(given, g)


def check(
    dtype, tolerance, queries, shape, score="softmax", contrast=True, seen=True, poison=None, **options
):
    batch, _, heads, head_dim = shape
    f = functools.partial(compress, score=score, **{"interpret": True} | options)
    (q, k1, k2, v, gamma, g), got = run(f, dtype, (batch, queries, heads, head_dim), shape, contrast, poison)
    scale = options.get("scale", 1 / (queries * head_dim**0.5))
    want = oracle.compress(q, k1, k2 if contrast else None, v, gamma, scale, score, g, seen)
    distances = [oracle.distance(x, y) for x, y in zip(got, (w for w in want if w is not None), strict=True)]
    assert max(distances) < tolerance, distances


@pytest.mark.parametrize("score", ["softmax", "relu2", "laplace"])
def test_matches_reference_in_float32(score):
    check(jnp.float32, 1e-5, 20, (1, 500, 2, 128), score, scale=0.3, block=128, splits=2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 140, 2, 64), (1, 40, 1, 72), (1, 3, 1, 256)])
def test_head_dims_and_default_scale(shape):
    check(jnp.float32, 1e-5, 7, shape)


def test_matches_reference_in_bfloat16():
    check(jnp.bfloat16, 1e-2, 64, (1, 384, 2, 64), scale=0.125)


def test_single_attention():
    check(jnp.float32, 1e-5, 130, (1, 256, 1, 128), contrast=False, scale=0.2)


@pytest.mark.parametrize("score", slow_unless(["softmax", "laplace"], ("softmax",)))
def test_lengths_and_poison(score):
    """Tokens beyond a length may be NaN; an empty history gives 0."""
    lengths = jnp.asarray([0, 201], jnp.int32)
    there = np.arange(300)[None] < np.asarray(lengths)[:, None]
    check(
        jnp.float32,
        1e-5,
        5,
        (2, 300, 1, 64),
        score,
        seen=there[:, None, None],
        poison=~jnp.asarray(there)[:, :, None, None],
        scale=0.5,
        block=128,
        key_lengths=lengths,
    )


def test_large_logits():
    check(jnp.float32, 1e-5, 9, (1, 256, 1, 128), scale=1.0, block=128, splits=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blocks", "block_size", "history", "ragged"),
    [(3, 128, 128, False), (4, 16, 40, True), (2, 144, 300, True), (1, 7, 150, True)],
)
def test_blockwise_history(blocks, block_size, history, ragged, hostile):
    """Each block agrees with a call of `compress` on its history alone; NaN precedes a short history."""
    heads, head_dim = 2, 64
    length = history + (blocks - 1) * block_size + 5
    shape, queries = (2, length, heads, head_dim), (2, blocks, 4, heads, head_dim)
    lengths = np.full((2, blocks), history)
    if ragged:
        lengths = np.minimum(history, np.arange(blocks) * block_size + np.asarray([[0], [3]]))
    f = functools.partial(compress_blocks, block_size=block_size, history_size=history, interpret=hostile)
    f = functools.partial(f, history_lengths=jnp.asarray(lengths, jnp.int32) if ragged else None)
    unread = (np.arange(length) < history - lengths[:, :1])[:, :, None, None]
    given, got = run(functools.partial(f, scale=0.4), jnp.float32, queries, shape, poison=jnp.asarray(unread))
    q, k1, k2, v, gamma, g = (np.asarray(x) for x in given)
    total = [np.zeros(x.shape) for x in got]
    for i, b in np.ndindex(2, blocks):
        stop = b * block_size + history
        part = slice(stop - lengths[i, b], stop)
        if lengths[i, b] == 0:
            assert not np.asarray(got[0])[i, b].any()
            continue
        one = slice(i, i + 1)
        out, gq, *rest, ggamma = oracle.compress(
            q[one, b], k1[one, part], k2[one, part], v[one, part], gamma, 0.4, "softmax", g[one, b]
        )
        total[0][one, b], total[1][one, b] = out, gq
        for whole, x in zip(total[2:5], rest):
            whole[one, part] += x
        total[5] += ggamma
    assert max(oracle.distance(x, y) for x, y in zip(got, total)) < 1e-5


@pytest.mark.slow
def test_poisoned_memory_and_any_order(hostile):
    check(jnp.float32, 1e-5, 4, (1, 300, 1, 64), block=128, splits=3, interpret=hostile)


@pytest.mark.parametrize(
    ("queries", "change", "words"),
    [
        (16, {"score": "cosine"}, "score must be one of softmax, relu2, laplace, got 'cosine'"),
        (16, {"block": 100}, "block must be a positive multiple of 128, got 100"),
        (16, {"splits": 0}, "splits must be at least 1, got 0"),
        (16, {"gamma": None}, "contrast_key and gamma belong together"),
        (16, {"gamma": jnp.ones((3,))}, r"gamma must have shape \(2,\), got \(3,\)"),
    ],
)
def test_bad_input(queries, change, words):
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 128), jnp.float32) for n in (queries, 300))
    f = functools.partial(compress, **{"gamma": jnp.ones((2,))} | change)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(f, q, k, k, k)


def test_bad_blocks():
    q, k = jnp.zeros((1, 3, 4, 2, 64)), jnp.zeros((1, 384, 2, 64))
    f = functools.partial(compress_blocks, q, k, None, k, gamma=None)
    with pytest.raises(ValueError, match=r"must hold .* = 200 \+ 2 \* 128 tokens, got 384"):
        f(block_size=128, history_size=200)
    with pytest.raises(NotImplementedError, match="block_size must be a multiple of 16, got 100"):
        f(block_size=100, history_size=100)
    with pytest.raises(ValueError, match=r"history_lengths must have shape \(1, 3\), got \(3, 1\)"):
        f(block_size=128, history_size=128, history_lengths=jnp.ones((3, 1), jnp.int32))
