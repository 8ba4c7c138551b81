"""full_attention on the TPU kernel, interpreted on a CPU and compared with the float64 oracle, and in TPU programs."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import ALiBi, T5Bias, alibi_slopes
from brl_jax.attention.dense.attend import MANY_TOKENS
from brl_jax.attention.dense.full import full_attention
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, expect, outputs_and_gradients, random_qkv, with_padding

on_kernel = functools.partial(outputs_and_gradients, full_attention, implementation="pallas_interpret")


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16],
    ids=["float32", "bfloat16"],
)
def test_segments_and_lengths(dtype):
    """Values are wider than the keys, padding is NaN, and a row has no keys."""
    query, key, *others = random_qkv(137, 145, batch=3, dtype=dtype)
    arrays = [query, key, *(jnp.concatenate([x, 2 * x, x[..., :3]], -1) for x in others)]
    query_ids, key_ids = (np.sort(np.random.default_rng(5).integers(0, 2, (3, n))) for n in (137, 145))
    poisoned, lengths, visible = with_padding(arrays, [137, 19, 30], [140, 145, 0])
    visible &= oracles.pairs(137, 145, oracles.everything, 8, 0, is_causal=True)
    visible &= query_ids[:, None, :, None] == key_ids[:, None, None, :]
    segments = (jnp.asarray(query_ids), jnp.asarray(key_ids))
    got = on_kernel(*poisoned, is_causal=True, query_offset=8, segment_ids=segments, **lengths)
    assert_close(got, expect(arrays, visible), 1e-5 if dtype == jnp.float32 else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-150, 0, 460])
def test_traced_offsets(offset):
    """Blocks of keys after the queries are skipped at run time."""
    arrays = random_qkv(140, 600)
    visible = oracles.pairs(140, 600, oracles.everything, offset, 0, is_causal=True)
    assert_close(on_kernel(*arrays, is_causal=True, query_offset=jnp.int32(offset)), expect(arrays, visible))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [None, (0.5, -1.0, 2.0, 0.0)], ids=["no sinks", "sinks"])
def test_kernel_equals_xla_in_residual_sinks_and_soft_cap(sinks):
    """Values and gradients; the last rows see no key."""
    query, key, value, d_out = random_qkv(150, 140)
    ids = jnp.asarray(np.r_[np.zeros(145), np.ones(5)], jnp.int32)[None].repeat(2, 0)
    sinks = None if sinks is None else jnp.asarray(sinks)

    def both(implementation):
        def attend(query, key, value, sinks):
            out, lse = full_attention(
                query, key, value, is_causal=True, sinks=sinks, logits_soft_cap=3.0, return_residual=True,
                segment_ids=(ids, ids[:, :140] * 0), implementation=implementation,
            )  # fmt: skip
            return out, jnp.where(jnp.isfinite(lse), lse, 7.0)

        results, pull = jax.vjp(attend, query, key, value, sinks)
        return *results, *pull((d_out, d_out[..., 0]))

    for x, y in zip(jax.tree.leaves(both("pallas_interpret")), jax.tree.leaves(both("xla")), strict=True):
        assert oracles.relative_error(x, y) < 1e-5


@pytest.mark.parametrize("packed", slow_unless([False, True], (False,)))
def test_mask_of_keys(packed):
    """A mask with padding anywhere, whose keys may be NaN; also with segments."""
    query, key, value, d_out = random_qkv(137, 145)
    mask = np.random.default_rng(5).random((2, 1, 1, 145)) < 0.7
    options, visible = {}, np.broadcast_to(mask, (2, 1, 137, 145))
    if packed:
        ids = np.arange(137)[None] // 50, np.arange(145)[None] // 60
        options = {"segment_ids": tuple(jnp.asarray(np.repeat(x, 2, 0)) for x in ids)}
        visible = visible & (ids[0][:, None, :, None] == ids[1][:, None, None, :])
    poison = lambda x: jnp.where(jnp.asarray(mask[:, 0, 0])[:, :, None, None], x, jnp.nan)  # noqa: E731
    got = on_kernel(query, poison(key), poison(value), d_out, mask=jnp.asarray(mask), **options)
    assert_close(got, expect((query, key, value, d_out), visible), 1e-5)


@jax.tree_util.register_static
class _Parity:
    """A bias on odd keys only."""

    def __call__(self, query_positions, key_positions):
        return (
            jnp.broadcast_to(key_positions % 2, (4, query_positions.shape[0], key_positions.shape[0])) * 1.0
        )


@pytest.mark.parametrize(
    ("kind", "offset", "traced"),
    slow_unless(
        [("alibi", 7, False), ("alibi", 460, True), ("t5", 460, True), ("t5", -5, False)],
        (("t5", -5, False),),
    ),
)
def test_bias_equals_oracle(kind, offset, traced):
    """Also its gradient. Causal cases know the offset only at run time. With a cap, the bias is added after it."""
    num_queries, num_keys = (140, 600) if traced else (300, 290)
    query, key, value, d_out = random_qkv(num_queries, num_keys, batch=1)
    distance = np.arange(num_queries)[:, None] + offset - np.arange(num_keys)
    numbers = np.random.default_rng(1).standard_normal((12, 4) if kind == "t5" else 4).astype(np.float32) / 4
    of = functools.partial(T5Bias, max_distance=50, bidirectional=not traced) if kind == "t5" else ALiBi
    dense, pull = (
        oracles.t5(numbers, distance, 50, not traced) if kind == "t5" else oracles.alibi(numbers, distance)
    )

    def both(query, key, value, numbers, offset):
        def attend(query, key, value, numbers):
            return full_attention(
                query, key, value, of(numbers), is_causal=traced, query_offset=offset, logits_soft_cap=2.0,
                implementation="pallas_interpret",
            )  # fmt: skip

        out, pull = jax.vjp(attend, query, key, value, numbers)
        return out, *pull(d_out)

    run_both = jax.jit(both, static_argnums=() if traced else 4)
    given = jnp.int32(offset) if traced else offset
    *got, grad = run_both(query, key, value, jnp.asarray(numbers), given)
    visible = oracles.pairs(num_queries, num_keys, oracles.everything, offset, 0, is_causal=traced)
    expected = expect((query, key, value, d_out), visible, bias=dense[None], cap=2.0)
    assert_close(got, expected)
    assert oracles.relative_error(grad, pull(expected[4])) < 1e-5


def _program(platform, length, **options):
    """The text of the gradient's program, lowered for a platform."""
    x, y = (jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32) for heads in (2, 1))
    step = jax.jit(jax.grad(lambda *qkv: full_attention(*qkv, **options).sum(), argnums=(0, 1, 2)))
    return step.trace(x, y, y).lower(lowering_platforms=(platform,)).as_text()


def _all_pairs(text, length):
    return re.search(rf"tensor<(\d+x)*{length}x{length}x", text) is not None


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"implementation": "xla"}, {"bias": ALiBi(alibi_slopes(2))}],
    ids=["kernel", "xla", "bias"],
)
def test_many_tokens_on_a_tpu_take_no_array_of_all_pairs(options):
    """Law 8 for full attention, forward and backward. XLA on a GPU does hold the scores."""
    length = MANY_TOKENS + 1
    text = _program("tpu", length, **options)
    assert not _all_pairs(text, length)
    assert ("tpu_custom_call" in text) == ("implementation" not in options)
    assert _all_pairs(_program("cuda", length, **options), length)


def test_few_tokens_go_through_xla():
    text = _program("tpu", MANY_TOKENS - 1, is_causal=True)
    assert "tpu_custom_call" not in text


def test_what_the_kernel_refuses():
    query, key, value, _ = random_qkv(9)
    attend = functools.partial(full_attention, query, key, value, implementation="pallas_interpret")
    with pytest.raises(NotImplementedError, match=r"bias must be None or depend .* got an array"):
        attend(bias=jnp.zeros((9, 9)))
    with pytest.raises(
        NotImplementedError, match=r"bias must be None or depend on the distance alone .* got _Parity"
    ):
        attend(bias=_Parity())
    with pytest.raises(NotImplementedError, match="query_offset must be a static int with ALiBi"):
        attend(bias=ALiBi(alibi_slopes(4)), query_offset=jnp.int32(3))
    with pytest.raises(
        NotImplementedError, match=r"mask must be the same for all heads and queries, got shape"
    ):
        attend(mask=jnp.ones((9, 9), bool))
