"""full_attention against the float64 oracle, and its edge cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import ALiBi, T5Bias, alibi_slopes
from brl_jax.attention.dense import attend, full_xla
from brl_jax.attention.dense.full import full_attention
from tests.oracles import attention as oracles
from tests.support.attention import (
    assert_close,
    check_causal,
    expect,
    outputs_and_gradients,
    random_qkv,
    with_padding,
)

run = functools.partial(outputs_and_gradients, full_attention)


@pytest.fixture(params=["at once", "in blocks"])
def blocks(request, monkeypatch):
    """The form for few tokens, and the form for many: blocks of queries, grouped if causal."""
    if request.param == "in blocks":
        monkeypatch.setattr(attend, "MANY_TOKENS", 1)
        monkeypatch.setattr(full_xla, "QUERY_BLOCK", 3)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (33, 33), (5, 40), (40, 5)])
def test_equals_oracle(num_queries, num_keys, is_causal):
    arrays = random_qkv(num_queries, num_keys)
    visible = oracles.pairs(num_queries, num_keys, oracles.everything, is_causal=is_causal)
    assert_close(run(*arrays, is_causal=is_causal), expect(arrays, visible))


@pytest.mark.usefixtures("blocks")
def test_bfloat16():
    arrays = random_qkv(60, head_dim=16, dtype=jnp.bfloat16)
    got = run(*arrays, is_causal=True, scale=0.3)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close(
        got, expect(arrays, oracles.pairs(60, 60, oracles.everything, is_causal=True), scale=0.3), 2e-2
    )


def test_bfloat16_from_a_cache():
    """A cache keeps heads before tokens; in another order of factors, XLA for CPUs has no product for it."""
    query, *cache, _ = random_qkv(3, 12, dtype=jnp.bfloat16)
    cache = [jnp.swapaxes(x, 1, 2) for x in cache]
    got = jax.jit(lambda q, k, v: full_attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)))(
        query, *cache
    )
    want = full_attention(query, *(jnp.swapaxes(x, 1, 2) for x in cache))
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("offset", [-3, 0, 17])
def test_query_offset_traced_or_not(offset):
    """Rows before the first key see nothing and give 0."""
    arrays = random_qkv(9, 30)
    visible = oracles.pairs(9, 30, oracles.everything, offset, 0, is_causal=True)
    for given in (offset, jnp.int32(offset)):
        got = run(*arrays, is_causal=True, query_offset=given)
        assert_close(got, expect(arrays, visible))
        assert not np.asarray(got[0])[:, ~visible.any(-1)].any()


@pytest.mark.usefixtures("blocks")
def test_lengths_and_poisoned_padding():
    arrays = random_qkv(30, batch=3)
    poisoned, lengths, visible = with_padding(arrays, [30, 12, 1], [20, 30, 0])
    assert_close(run(*poisoned, **lengths), expect(arrays, visible))


@pytest.mark.usefixtures("blocks")
def test_segments():
    rng = np.random.default_rng(2)
    arrays = random_qkv(20, 30)
    ids = rng.integers(0, 4, (2, 20)), rng.integers(0, 3, (2, 30))
    visible = (ids[0][:, :, None] == ids[1][:, None, :])[:, None]
    assert not visible.any(-1).all()
    assert_close(run(*arrays, segment_ids=tuple(jnp.asarray(x) for x in ids)), expect(arrays, visible))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", ["alibi", "t5", "array"])
def test_bias_and_its_gradient(kind):
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    bias = {"alibi": ALiBi(alibi_slopes(4)), "t5": T5Bias(normal(8, 4), 32), "array": normal(4, 1, 25)}[kind]
    arrays = random_qkv(25)
    positions = jnp.arange(25)
    as_array = (
        (lambda b: jnp.broadcast_to(b, (4, 25, 25))) if kind == "array" else lambda b: b(positions, positions)
    )
    dense, pull_dense = jax.vjp(as_array, bias)
    visible = oracles.pairs(25, 25, oracles.everything, is_causal=True)
    expected = expect(arrays, visible, bias=np.asarray(dense)[None])
    expected_bias = pull_dense(jnp.asarray(expected[4].sum(0), jnp.float32))[0]
    *got, got_bias = run(*arrays, is_causal=True, bias=bias, by=("bias",))
    assert_close(got, expected)
    for x, y in zip(jax.tree.leaves(got_bias), jax.tree.leaves(expected_bias)):
        assert oracles.relative_error(x, y) < 1e-4


@pytest.mark.usefixtures("blocks")
def test_causal_bitwise():
    check_causal(functools.partial(full_attention, is_causal=True), random_qkv(50, batch=1), (30,))


def test_lowers_for_other_platforms():
    for dtype in (jnp.float32, jnp.bfloat16):
        shape = jax.ShapeDtypeStruct((1, 64, 2, 16), dtype)
        for platform in ("cpu", "tpu", "cuda"):
            jax.jit(full_attention).trace(*[shape] * 3).lower(lowering_platforms=(platform,))


Q = jnp.zeros((2, 10, 4, 8))
KV = jnp.zeros((2, 10, 2, 8))


def test_cudnn_takes_half_precision_and_heads_of_one_size():
    message = (
        r"only with bfloat16 or float16 .got float32.; with equal head_dims of value and query .got 3 and 8."
    )
    with pytest.raises(NotImplementedError, match=message):
        full_attention(Q, KV, KV[..., :3], implementation="cudnn")


def test_rows_whose_bias_is_minus_infinity_give_zero():
    """Forward and in every gradient; the other rows don't see keys with such a bias."""
    arrays = random_qkv(12)
    bias = np.random.default_rng(4).standard_normal((2, 4, 12, 12)).astype(np.float32)
    bias[:, :, 3] = bias[:, :, :, 5] = -np.inf
    bias[1, 2, 7] = -np.inf
    visible = np.isfinite(bias)
    expected = expect(arrays, visible, bias=np.where(visible, bias, 0.0))
    *got, got_bias = run(*arrays, bias=jnp.asarray(bias), by=("bias",))
    assert_close(got, expected)
    assert oracles.relative_error(got_bias, expected[4]) < 1e-4
    assert not np.asarray(got[0][:, 3]).any()
    assert not np.asarray(got_bias)[~visible].any()


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_lowest_bias_hides_a_key_as_minus_infinity_does(dtype):
    """A query gives 0 if all its keys have this bias, although the keys hidden by causality or length score higher."""
    query, key, value, _ = random_qkv(12)
    lowest = jnp.zeros((2, 1, 1, 12), dtype).at[:, :, :, :4].set(jnp.finfo(dtype).min)
    for bias in (lowest, jnp.broadcast_to(lowest, (2, 4, 12, 12))):
        options = {"is_causal": True, "key_value_seq_lengths": jnp.asarray([12, 3]), "return_residual": True}
        got, expected = (
            full_attention(query, key, value, b, **options)
            for b in (bias, jnp.where(bias < 0, -jnp.inf, bias))
        )
        assert not np.asarray(got[0][0, :4]).any()
        assert not np.asarray(got[0][1]).any()
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_sinks_and_soft_cap(implementation):
    """The bias is added after the cap, and some rows see only the sink."""
    arrays = random_qkv(12, 15)
    sinks = jnp.asarray([0.5, -2.0, 3.0, 0.0])
    bias = jnp.asarray(np.random.default_rng(4).standard_normal((1, 4, 12, 15)), jnp.float32)
    mask = np.random.default_rng(5).random((2, 1, 12, 15)) < 0.5
    mask[..., 0, :] = False
    options = {"bias": bias, "mask": jnp.asarray(mask), "sinks": sinks, "logits_soft_cap": 0.8}
    found = run(*arrays, implementation=implementation, by=("sinks",), **options)
    expected = expect(arrays, mask, bias=bias, sinks=sinks, cap=0.8)
    for got, want in zip(found, (*expected[:4], expected[5])):
        assert oracles.relative_error(got, want) < 1e-4
    message = r"cudnn' supports full attention only with .*no sinks; with no logits_soft_cap"
    with pytest.raises(NotImplementedError, match=message):
        full_attention(*arrays[:3], sinks=sinks, logits_soft_cap=0.8, implementation="cudnn")


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shape", [(12, 15), (4, 1, 15), (2, 1, 12, 15), (2, 4, 12, 15)])
def test_mask(shape):
    """As in `jax.nn.dot_product_attention`, applied by position after the bias; rows without a key give 0."""
    arrays = random_qkv(12, 15)
    mask = np.random.default_rng(5).random(shape) < 0.5
    mask[..., 0, :] = False
    got = run(*arrays, bias=None, mask=jnp.asarray(mask))
    assert_close(got, expect(arrays, mask))
    by_position = full_attention(*arrays[:3], None, jnp.asarray(mask))
    assert oracles.relative_error(by_position, got[0]) < 1e-5


def test_cudnn_can_be_differentiated_again(monkeypatch):
    """A stand-in for cuDNN that, like cuDNN, can be differentiated once and in reverse mode only, from what it kept."""
    query, key, value, d_out = random_qkv(6, dtype=jnp.bfloat16)
    plain = functools.partial(full_attention, implementation="xla")

    def forward(query, key, value):
        out, sums = full_attention(
            *(x.astype(jnp.float32) for x in (query, key, value)), return_residual=True
        )
        out, sums = out.astype(query.dtype), sums.swapaxes(1, 2)
        return out, (query, key, value, sums, out)

    def backward(kept, d_out):
        query, key, value, sums, out = (x.astype(jnp.float32) for x in kept)
        scale, group = query.shape[3] ** -0.5, query.shape[2] // key.shape[2]
        wide_key, wide_value = (jnp.repeat(x, group, 2) for x in (key, value))
        weights = jnp.exp(jnp.einsum("btnh,bsnh->bnts", query, wide_key) * scale - sums[..., None])
        d_out = d_out.astype(jnp.float32)
        change = jnp.einsum("btnh,bsnh->bnts", d_out, wide_value)
        d_scores = weights * (change - jnp.einsum("btnh,btnh->bnt", d_out, out)[..., None]) * scale
        d_query = jnp.einsum("bnts,bsnh->btnh", d_scores, wide_key)
        d_key = jnp.einsum("bnts,btnh->bsnh", d_scores, query)
        d_value = jnp.einsum("bnts,btnh->bsnh", weights, d_out)
        d_key, d_value = (x.reshape(*key.shape[:3], group, -1).sum(3) for x in (d_key, d_value))
        return tuple(x.astype(kept[0].dtype) for x in (d_query, d_key, d_value))

    kernel = jax.custom_vjp(lambda *x: forward(*x)[0])
    kernel.defvjp(forward, backward)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *qkv, **options: kernel(*qkv))

    def tangents(attend):
        def gradient(query):
            return jax.vjp(lambda query: attend(query, key, value), query)[1](d_out)[0]

        def attend_and_gradient(query):
            return attend(query, key, value), gradient(query)

        return jax.jit(lambda query: jax.jvp(attend_and_gradient, (query,), (d_out,)))(query)

    got = tangents(functools.partial(full_attention, implementation="cudnn"))
    expected = [x.astype(jnp.float32) for x in jax.tree.leaves(tangents(plain))]
    assert_close(jax.tree.leaves(got), expected, 2e-2)
