"""compress and propagate against float64 NumPy written from equations 8-12."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import ALiBi, T5Bias, alibi_slopes, compress, propagate
from brl_jax.attention.compressed import compress as compress_module
from brl_jax.attention.compressed import xla
from brl_jax.attention.core.by_platform import traced_for
from tests.attention.compressed.cases import SCORES, arrays
from tests.oracles.compressed import compress as oracle_compress
from tests.support.attention import check
from tests.support.numbers import relative_error

# Only through XLA: including the TPU kernels would double the time, and test_kernels.py tests them.
xla_compress, xla_propagate = (functools.partial(f, implementation="xla") for f in (compress, propagate))


def read_in_pieces(monkeypatch, piece):
    """Reads histories longer than `piece` in pieces of that size. Clears the cache of programs traced with other
    sizes."""
    monkeypatch.setattr("brl_jax.attention.compressed.compress._WHOLE", piece)
    monkeypatch.setattr("brl_jax.attention.compressed.xla.piece_size", lambda queries, keys: min(keys, piece))
    compress_module._choose.clear_cache()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("length", "piece"), [(1, 4096), (37, 4096), (37, 8), (64, 16)])
def test_compress_oracle(monkeypatch, score, length, piece):
    """Whole or in pieces, at ragged lengths, with values wider than keys: outputs and all gradients."""
    read_in_pieces(monkeypatch, piece)
    operands = arrays(0, (2, 5, 3, 4), (2, length, 3, 4), (2, length, 3, 4), (2, length, 3, 5), (3,))

    def function(q, k1, k2, v, gamma):
        return xla_compress(q, k1, k2, v, gamma=gamma, scale=0.7, score=score)

    def oracle(q, k1, k2, v, gamma):
        return oracle_compress(q, k1, k2, v, gamma, 0.7, score)

    check(function, oracle, operands)
    half = [jnp.asarray(x, jnp.bfloat16) for x in operands[:4]]
    rough = jax.jit(function)(*half, jnp.asarray(operands[4], jnp.float32))
    assert rough.dtype == jnp.bfloat16
    assert relative_error(rough, oracle(*operands)) < 2e-2


@pytest.mark.parametrize("piece", [4096, 8])
def test_float64_keeps_its_digits(monkeypatch, piece):
    read_in_pieces(monkeypatch, piece)
    operands = arrays(0, (2, 5, 3, 4), (2, 37, 3, 4), (2, 37, 3, 4), (2, 37, 3, 4), (3,))
    with jax.enable_x64(True):
        q, k1, k2, v, gamma = (jnp.asarray(x, jnp.float64) for x in operands)
        compressed = xla_compress(q, k1, k2, v, gamma=gamma, scale=0.7)
        propagated = xla_propagate(k1, q, q, strength=gamma, scale=0.7)
    assert (compressed.dtype, propagated.dtype) == (jnp.float64, jnp.float64)
    assert relative_error(compressed, oracle_compress(*operands, 0.7, "softmax")) < 1e-14
    weights = np.exp(0.7 * np.einsum("btnh,bmnh->btnm", operands[1], operands[0]))
    expected = np.einsum("btnm,bmnh->btnh", weights / weights.sum(-1, keepdims=True), operands[0])
    assert relative_error(propagated, operands[4][:, None] * expected) < 1e-14


def test_gpus_read_long_histories_at_once(monkeypatch):
    """If the kernel does not support them. On other platforms only one piece's logits exist at a time."""
    read_in_pieces(monkeypatch, 8)
    operands = arrays(0, (2, 5, 3, 4), (2, 37, 3, 4), (2, 37, 3, 4), (2, 37, 3, 4), (3,))

    def function(q, k1, k2, v, gamma):
        return xla_compress(q, k1, k2, v, gamma=gamma, scale=0.7)

    def slope(*operands):
        return jax.grad(lambda *xs: function(*xs).sum(), argnums=range(5))(*operands)

    traced = jax.jit(slope).trace(*(jnp.asarray(x, jnp.float32) for x in operands))
    on = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")}
    pieces = [(name, keys) for name in on for keys in (37, 8) if f"tensor<2x3x5x{keys}xf32>" in on[name]]
    assert pieces == [("cuda", 37), ("cpu", 8)]
    with traced_for("cuda"):
        check(function, lambda *xs: oracle_compress(*xs, 0.7, "softmax"), operands)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_a_gpu_reads_all_keys_at_once(monkeypatch, all_at_once, score):
    """The form for GPUs: outputs and all gradients, with a bias, a mask and ragged lengths."""
    read_in_pieces(monkeypatch, 8)
    shapes = (2, 5, 3, 4), *[(2, 37, 3, 4)] * 3, (3,), (1, 3, 5, 37)
    operands = arrays(2, *shapes)
    lengths = np.array([30, 5])
    mask = np.random.default_rng(0).random((2, 1, 5, 37)) < 0.6
    visible = mask & (np.arange(37) < lengths[:, None])[:, None, None]

    def function(q, k1, k2, v, gamma, bias):
        return xla_compress(
            q, k1, k2, v, gamma=gamma, scale=0.7, score=score, bias=bias, mask=jnp.asarray(mask),
            key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
        )  # fmt: skip

    def oracle(q, k1, k2, v, gamma, bias):
        return oracle_compress(q, k1, k2, v, gamma, 0.7, score, bias, visible)

    check(function, oracle, operands)
    compress_module._choose.clear_cache()


@pytest.mark.parametrize(("platform", "loops"), [("cuda", False), ("cpu", True), ("tpu", True)])
def test_the_platform_decides_whether_pieces_are_read(monkeypatch, platform, loops):
    """Forward and backward, with lengths and without."""
    read_in_pieces(monkeypatch, 16)
    few, many = (jax.ShapeDtypeStruct((2, n, 2, 4), jnp.float32) for n in (3, 64))

    def both(q, k, v, lengths):
        out, pull = jax.vjp(lambda *x: xla_compress(*x[:2], None, x[2], gamma=None), q, k, v)
        return pull(xla_compress(q, k, None, v, gamma=None, key_value_seq_lengths=lengths) + out)

    traced = jax.jit(both).trace(few, many, many, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert ("stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()) == loops


@pytest.mark.parametrize("piece", [4096, 8])
@pytest.mark.parametrize("score", SCORES)
def test_compress_masks_and_poison(monkeypatch, score, piece):
    """Masked keys have no weight or gradient and may hold NaN; a row without keys gives 0."""
    read_in_pieces(monkeypatch, piece)
    q, k1, k2, v = arrays(1, (2, 3, 2, 4), (2, 21, 2, 4), (2, 21, 2, 4), (2, 21, 2, 4))
    gamma = np.array([0.3, -0.2])
    lengths = np.array([13, 0])
    mask = np.random.default_rng(0).random((2, 1, 3, 21)) < 0.6
    visible = mask & (np.arange(21) < lengths[:, None])[:, None, None]
    expected = oracle_compress(q, k1, k2, v, gamma, 0.5, score, mask=visible)
    for a in (k1, k2, v):
        for b in range(2):
            a[b, lengths[b] :] = np.nan

    def function(q, k1, k2, v):
        return xla_compress(
            q,
            k1,
            k2,
            v,
            gamma=jnp.asarray(gamma, jnp.float32),
            scale=0.5,
            score=score,
            mask=jnp.asarray(mask),
            key_value_seq_lengths=jnp.asarray(lengths, jnp.int32),
        )

    def output_and_gradients(*xs):
        out, pull = jax.vjp(function, *xs)
        return out, pull(out)

    out, grads = jax.jit(output_and_gradients)(*(jnp.asarray(x, jnp.float32) for x in (q, k1, k2, v)))
    assert relative_error(out, expected) < 1e-5
    np.testing.assert_array_equal(out[1], 0)
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)
    for g in grads[1:]:
        np.testing.assert_array_equal(g[0, 13:], 0)
        np.testing.assert_array_equal(g[1], 0)


@pytest.mark.parametrize("piece", [4096, 8])
def test_compress_defaults_and_biases(monkeypatch, piece):
    """The M1 scale, ALiBi and T5 biases, a bias array, and no second attention."""
    read_in_pieces(monkeypatch, piece)
    q, k1, v, table = arrays(2, (1, 6, 4, 8), (1, 19, 4, 8), (1, 19, 4, 8), (8, 4))
    js = [jnp.asarray(x, jnp.float32) for x in (q, k1, v)]

    def read(q, k, v, **options):
        return xla_compress(q, k, None, v, gamma=None, **options)

    expected = oracle_compress(q, k1, None, v, None, 1 / (6 * math.sqrt(8)), "softmax")
    assert relative_error(jax.jit(read)(*js), expected) < 1e-5

    distance = np.abs(np.arange(6)[:, None] - np.arange(19)[None])
    slopes = np.array([2.0 ** (-2 * (i + 1)) for i in range(4)])
    out = jax.jit(lambda *xs: read(*xs, scale=0.5, bias=ALiBi(alibi_slopes(4))))(*js)
    expected = oracle_compress(q, k1, None, v, None, 0.5, "softmax", bias=-slopes[:, None, None] * distance)
    assert relative_error(out, expected) < 1e-5

    def with_table(table):
        return read(*js, scale=0.5, bias=T5Bias(table, max_distance=16))

    relative = np.arange(19)[None] - np.arange(6)[:, None]
    buckets = np.zeros((6, 19), int)
    for i, j in np.ndindex(6, 19):
        far = max(-relative[i, j], 0)
        buckets[i, j] = far if far < 4 else min(7, 4 + int(math.log(far / 4) / math.log(16 / 4) * 4))
    bias = np.moveaxis(table[buckets], -1, 0)[None]
    out, pull = jax.vjp(jax.jit(with_table), jnp.asarray(table, jnp.float32))
    expected = oracle_compress(q, k1, None, v, None, 0.5, "softmax", bias=bias)
    assert relative_error(out, expected) < 1e-5
    (grad,) = pull(out)
    assert float(jnp.abs(grad[:3]).min()) > 0  # buckets 0..2 occur and get gradients
    for array in (bias, bias[:, :1]):
        check(
            lambda q, k, v, b: read(q, k, v, scale=0.5, bias=b),
            lambda q, k, v, b: oracle_compress(q, k, None, v, None, 0.5, "softmax", bias=b),
            [q, k1, v, array],
        )


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("length", [1, 13, 700])
def test_propagate_oracle(score, length):
    """T queries on M keys equal compression with the roles exchanged and a single attention."""
    q, k, v, strength = arrays(5, (2, length, 3, 4), (2, 5, 3, 4), (2, 5, 3, 5), (3,))

    def function(q, k, v, strength):
        return xla_propagate(q, k, v, strength=strength, score=score)

    def oracle(q, k, v, strength):
        return oracle_compress(q, k, None, v, None, 0.5, score) * strength[:, None]

    operands = (q, k, v, strength)
    check(function, oracle, operands)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    rough = jax.jit(function)(*half, jnp.asarray(strength, jnp.float32))
    assert relative_error(rough, oracle(*operands)) < 2e-2


def test_long_histories_and_queries_are_linear_in_memory():
    """Neither function ever holds all its weights: doubling the length only adds inputs and gradients."""

    def temporary(n):
        shape = jax.ShapeDtypeStruct((1, n, 4, 32), jnp.float32)
        small = jax.ShapeDtypeStruct((1, 256, 4, 32), jnp.float32)

        def loss(q, k, c, v, x):
            read = xla_compress(q, k, c, v, gamma=0.1)
            return jnp.sum(xla_propagate(x, read, read, strength=1.0))

        grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
        return grad.lower(small, shape, shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(2**14), temporary(2**15)
    assert long <= 2.2 * short
    weights = 2**15 * 256 * 4 * 4
    assert long < 3 * weights, (long, weights)


@pytest.mark.parametrize("length", [0, 1, 4096, 4500, 5001])
def test_a_cache_is_read_up_to_its_length(length):
    """In two pieces, the second of which begins early. NaN follows the tokens."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 2, n, 4)).astype(np.float32) for n in (3, 5001, 5001))
    logits = np.einsum("bnmh,bnsh->bnms", query.astype(np.float64), key[:, :, :length]) * 0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    expected = np.einsum("bnms,bnsh->bnmh", weights, value[:, :, :length])
    key[:, :, length:] = value[:, :, length:] = np.nan
    found = jax.jit(functools.partial(xla.read_cache, scale=0.5))(query, key, value, jnp.int32(length))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
