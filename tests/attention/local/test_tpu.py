"""Every pattern of local attention on the TPU kernels, interpreted on a CPU, against the float64 oracle."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import ALiBi, RotaryBias, T5Bias
from brl_jax.attention.local.far_patterns import Axial, BigBird, BlockMask, GlobalWindow, Strided
from brl_jax.attention.local.patterns import Neighbourhood, SlidingWindow
from tests.attention.local.cases import PATTERNS, SINKS, run
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, expect, random_qkv, with_padding

on_kernels = functools.partial(run, implementation="pallas_interpret")


# Fast: the window kernel, and the kernel for any pattern with a mask of blocks and with merged parts.
@pytest.mark.parametrize("name", slow_unless(PATTERNS, ("sliding", "block_mask", "global_window")))
def test_pattern_equals_oracle(name):
    """Causal where possible; test_absent.py has padded rows and segments."""
    pattern, sees = PATTERNS[name]
    causal = pattern.causal_ok
    arrays = random_qkv(130, batch=1, heads=2)
    got = on_kernels(*arrays, pattern=pattern, is_causal=causal)
    assert_close(got, expect(arrays, oracles.pairs(130, 130, sees, is_causal=causal)), 1e-5)


@pytest.mark.parametrize("name", slow_unless(["bucketed", "fixed"], ("bucketed",)))
def test_traced_offset(name):
    """The position of a cache's first key is known only at run time, and may be negative."""
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(150, 170, batch=1, heads=2)
    for key_offset in (-20, 13):
        got = on_kernels(
            *arrays, pattern=pattern, is_causal=True, query_offset=20, key_offset=jnp.int32(key_offset)
        )
        assert_close(
            got, expect(arrays, oracles.pairs(150, 170, sees, 20 + key_offset, key_offset, True)), 1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "sees"),
    [
        (BlockMask.of(128, np.asarray([[0, 1, 0], [0, 0, 0], [1, 0, 1]], bool)), None),
        (BigBird(64, global_blocks=1, random_blocks=1, seed=3), None),
        (GlobalWindow(130, 10, 140), oracles.global_window(130, 10, 140)),
        (Strided(100), oracles.strided(100)),
        (Axial(24), oracles.axial(24)),
        (Neighbourhood(24, 1, 2), oracles.neighbourhood(24, 1, 2)),
        (GlobalWindow(9, 7, 5, 40), oracles.global_window(9, 7, 5, 40)),
        (SlidingWindow(6000, 0), oracles.sliding(6000, 0)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_blocks_as_large_as_the_kernels_own(pattern, sees):
    """Only lists where granules are whole blocks; bits for several granules; lists across many blocks."""
    length = 384
    arrays = random_qkv(length, batch=1, heads=2, head_dim=16)
    at = np.arange(length)
    if sees is None:
        visible = np.asarray(pattern.visible(at[:, None], at[None, :], length))
    else:
        visible = oracles.pairs(length, length, sees)
    assert_close(on_kernels(*arrays, pattern=pattern), expect(arrays, visible), 1e-5)


SLOPES = np.float32([0.3, -0.05])
TABLE = np.random.default_rng(3).standard_normal((8, 2)).astype(np.float32)


def run_biased(arrays, bias, **kwargs):
    """Output and gradients of query, key, value and bias on the kernels."""
    *got, grad = on_kernels(*arrays, bias=bias, by=("bias",), **kwargs)
    return got, jax.tree.leaves(grad)


# Fast: a window, tokens in phases, and a pattern whose blocks are looked up.
BIASED = ["sliding", "dilated", "block_mask", "strided", "axial", "fixed", "global_window", "bucketed"]


@pytest.mark.parametrize("kind", ["alibi", "t5"])
@pytest.mark.parametrize(
    "name", slow_unless([x for x in BIASED if x in PATTERNS and x != "fixed"], BIASED[:3])
)
def test_bias_equals_oracle(name, kind):
    """With sinks, a soft cap, and keys that do not start at 0: the bias is added after the cap."""
    pattern, sees = PATTERNS[name]
    causal = pattern.causal_ok and kind == "alibi"
    arrays = random_qkv(130, 150, batch=1, heads=2, kv_heads=1)
    distance = np.arange(130)[:, None] + 20 - np.arange(150)
    if kind == "alibi":
        bias, (dense, pull) = ALiBi(jnp.asarray(SLOPES)), oracles.alibi(SLOPES, distance)
    else:
        bias, (dense, pull) = T5Bias(jnp.asarray(TABLE), 30, True), oracles.t5(TABLE, distance, 30, True)
    visible = oracles.pairs(130, 150, sees, 20 + 5, 5, causal)
    expected = expect(arrays, visible, bias=dense[None], sinks=SINKS[:2], cap=2.0)
    where = {"query_offset": 20, "key_offset": 5, "is_causal": causal}
    got, (grad,) = run_biased(arrays, bias, pattern=pattern, logits_soft_cap=2.0, sinks=SINKS[:2], **where)
    assert_close(got, expected, 1e-5)
    assert oracles.relative_error(grad, pull(expected[4])) < 1e-5


@pytest.mark.slow
def test_bias_of_packed_rows_in_bfloat16():
    """Segments and lengths, NaN in the padding, and a bias of vectors that rotate with the distance."""
    rng = np.random.default_rng(5)
    left, right = rng.standard_normal((2, 2, 8)).astype(np.float32)
    arrays = random_qkv(140, batch=2, heads=2, kv_heads=1, dtype=jnp.bfloat16)
    ids = np.tile(np.arange(140, dtype=np.int32) // 50, (2, 1))
    poisoned, lengths, visible = with_padding(arrays, [120, 0], [120, 0])
    visible = (
        visible
        & oracles.pairs(140, 140, oracles.sliding(30, 20))
        & (ids[:, None, None] == ids[:, None, :, None])
    )
    turn = (np.arange(140)[:, None] - np.arange(140))[..., None] * 10000.0 ** (-np.arange(4) / 4)
    even, odd = left[:, None, None, ::2], left[:, None, None, 1::2]
    turned = even * np.cos(turn) - odd * np.sin(turn), even * np.sin(turn) + odd * np.cos(turn)
    dense = sum((x * right[:, None, None, n::2]).sum(-1) for n, x in enumerate(turned))
    expected = expect(arrays, visible, bias=dense[None])
    bias = RotaryBias(jnp.asarray(left), jnp.asarray(right))
    options = {"local_window_size": (30, 20), "segment_ids": jnp.asarray(ids)} | lengths
    got, (d_left, d_right) = run_biased([*poisoned[:3], arrays[3]], bias, **options)
    assert_close(got, expected, 2e-2)
    weighted = expected[4].sum(0)[..., None]
    want = [(weighted * x * 1.0).sum((1, 2)) for x in turned]
    assert oracles.relative_error(d_right, np.stack(want, -1).reshape(2, 8)) < 2e-2
    assert np.isfinite(np.asarray(d_left)).all()
