"""Sinks and the soft cap of local attention, through XLA and on the TPU kernels, against the float64 oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import ALiBi, alibi_slopes
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from tests.attention.local.cases import BOTH, PATTERNS, SINKS
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import assert_close, expect, outputs_and_gradients, random_qkv, with_padding


def run(arrays, sinks, implementation="xla", **options):
    """Output and gradients of query, key, value and sinks."""
    options |= {"sinks": sinks, "implementation": implementation, "by": ("sinks",)}
    return outputs_and_gradients(local_attention, *arrays, **options)


def check(got, arrays, visible, sinks=SINKS, tolerance=1e-4, **options):
    """Asserts that output and gradients are the oracle's, under a cap of 2."""
    expected = expect(arrays, visible, sinks=sinks, cap=2.0, **options)
    assert_close(got, expected, tolerance)
    assert oracles.relative_error(got[4].astype(jnp.float32), expected[5]) < tolerance


def large(*sizes, **options):
    """Arrays whose scores are far into the nonlinear range of a cap of 2."""
    query, *rest = random_qkv(*sizes, **options)
    return 3 * query, *rest


@pytest.mark.parametrize("name", ["sliding", "strided", "block_mask"])
@BOTH
def test_equals_oracle(schedule, name):
    """Windows in tiles and in blocks, several parts, and rows that see nothing."""
    pattern, sees = PATTERNS[name]
    arrays = large(130)
    visible = oracles.pairs(130, 130, sees, is_causal=True)
    got = run(arrays, SINKS, pattern=pattern, is_causal=True, logits_soft_cap=2.0)
    check(got, arrays, visible)


@BOTH
def test_bias_lengths_and_segments(schedule):
    """The cap precedes the bias. The softmax excludes padding and other segments, but not the sink."""
    arrays = large(90)
    bias = ALiBi(alibi_slopes(4))
    ids = np.tile(np.arange(90, dtype=np.int32) // 40, (2, 1))
    poisoned, lengths, visible = with_padding(arrays, [61, 0], [61, 0])
    visible = (
        visible & oracles.pairs(90, 90, oracles.sliding(7, 3)) & (ids[:, None, None] == ids[:, None, :, None])
    )
    at = jnp.arange(90)
    options = {"segment_ids": jnp.asarray(ids), "bias": bias, "logits_soft_cap": 2.0} | lengths
    got = run(poisoned, SINKS, pattern=SlidingWindow(7, 3), **options)
    check(got, arrays, visible, bias=np.asarray(bias(at, at))[None])


@pytest.mark.parametrize("name", slow_unless(["sliding", "strided", "block_mask"], ["sliding", "block_mask"]))
def test_tpu_kernels_equal_oracle(name):
    """The window kernel, two merged launches, and the kernel for lists with bits."""
    pattern, sees = PATTERNS[name]
    arrays = large(130, batch=1)
    visible = oracles.pairs(130, 130, sees, is_causal=True)
    got = run(arrays, SINKS, "pallas_interpret", pattern=pattern, is_causal=True, logits_soft_cap=2.0)
    check(got, arrays, visible, tolerance=1e-5)


def test_bfloat16():
    arrays = large(130, dtype=jnp.bfloat16)
    visible = oracles.pairs(130, 130, oracles.sliding(7, 0))
    got = run(arrays, SINKS.astype(jnp.bfloat16), local_window_size=(7, 0), logits_soft_cap=2.0)
    assert got[4].dtype == jnp.bfloat16
    check(got, arrays, visible, SINKS.astype(jnp.bfloat16), 2e-2)


def test_extreme_sinks():
    """A sink of -inf changes nothing, and one far above all scores takes all the weight."""
    query, key, value, _ = random_qkv(40)
    attend = functools.partial(local_attention, query, key, value, local_window_size=(5, 0), is_causal=True)
    plain = attend(logits_soft_cap=2.0)
    np.testing.assert_allclose(attend(logits_soft_cap=2.0, sinks=jnp.full(4, -jnp.inf)), plain, atol=1e-6)
    assert not np.asarray(attend(sinks=jnp.full(4, 1e4))).any()
    d_sinks = jax.grad(lambda s: attend(sinks=s).sum())(jnp.full(4, -jnp.inf))
    assert not np.asarray(d_sinks).any()
