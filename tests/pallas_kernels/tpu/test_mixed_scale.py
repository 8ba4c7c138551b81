"""Tokens of mixed scale with logits up to 1e4: every kernel's outputs and gradients, forward and backward.

Float32 numbers near 1e4 are 2^-10 apart. Rounding such a logit makes an error of up to 5e-4, and its weight gets the
same relative error, so no kernel with float32 logits can guarantee 1e-5 for all inputs: in one case here, rounding the
exact logits once changes the reference itself by more. Hence there are two checks. If the inputs have so few bits that
no logit is rounded, results are within 1e-6. Otherwise the error is at most 1e-5, or the effect of rounding the exact
logits once, times the square root of the 128 rounded terms that a logit sums."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import block_attention, compress, compress_blocks, propagate, window_attention
from tests.marks import slow_unless
from tests.oracles import kernels as oracle
from tests.pallas_kernels.tpu.inputs import arrays, exact_arrays
from tests.support.attention import pulled

LENGTH, WINDOW, FEW, HEAD_DIM = 256, 127, 32, 128
AT = np.arange(LENGTH)
OFFSET = AT[None, :] - AT[:, None]
ROUNDING = HEAD_DIM**0.5


def window(q, k, v, g, scale, **options):
    mask = ((OFFSET <= 0) & (OFFSET >= -WINDOW))[None]
    f = functools.partial(window_attention, left=WINDOW, right=0, scale=scale, interpret=True)
    out, _, *grads = oracle.attention(q, k, v, mask, scale, g, **options)
    return f, (q, k, v, g), (out, *grads)


def blocks(q, k, v, g, scale, **options):
    """The first 60 queries see nothing."""
    f = functools.partial(
        block_attention,
        key_blocks=[[0, 1], [1]],
        block_q=128,
        block_k=128,
        mask=lambda queries, keys: (queries >= 60) & (keys != 200),
        scale=scale,
        interpret=True,
    )
    mask = (AT[:, None] >= 60) & (AT[None, :] != 200) & ((AT[:, None] < 128) | (AT[None, :] >= 128))
    out, _, *grads = oracle.attention(q, k, v, mask[None], scale, g, **options)
    return f, (q, k, v, g), (out, *grads)


def few_to_many(q, k, v, g, scale, **options):
    strength = jnp.ones((1,), jnp.float32)
    f = functools.partial(propagate, strength=strength, scale=scale, interpret=True)
    want = oracle.propagate(q, k[:, :FEW], v[:, :FEW], strength, scale, "softmax", g, **options)
    return f, (q, k[:, :FEW], v[:, :FEW], g), want[:4]


def contrast(q, k, v, g, scale, **options):
    gamma = jnp.full((1,), 0.5, jnp.float32)
    q, g, other = q[:, :FEW], g[:, :FEW], jnp.flip(k, 1)
    want = oracle.compress(q, k, other, v, gamma, scale, "softmax", g, **options)
    f = lambda q, k, other, v: compress(q, k, other, v, gamma=gamma, scale=scale, block=128, interpret=True)  # noqa: E731
    return f, (q, k, other, v, g), want[:5]


def histories(q, k, v, g, scale, **options):
    q, g = (x[:, : 2 * FEW].reshape(1, 2, FEW, 1, HEAD_DIM) for x in (q, g))
    f = functools.partial(compress_blocks, block_size=64, history_size=192, scale=scale, interpret=True)
    one = functools.partial(oracle.compress, gamma=None, scale=scale, score="softmax", **options)
    total = [np.zeros(x.shape) for x in (q, q, k, v)]
    for b in range(2):
        part = slice(b * 64, b * 64 + 192)
        out, gq, gk, _, gv, _ = one(q[:, b], k[:, part], None, v[:, part], grad=g[:, b])
        total[0][:, b], total[1][:, b] = out, gq
        total[2][:, part] += gk
        total[3][:, part] += gv
    return lambda q, k, v: f(q, k, None, v, gamma=None), (q, k, v, g), total


KERNELS = [window, blocks, few_to_many, contrast, histories]
SCALES = [HEAD_DIM**-0.5, 0.5]
SHAPES = [(1, LENGTH, 1, HEAD_DIM)] * 4


def largest_logit(q, k, scale):
    return np.abs(np.einsum("btnh,bsnh->bts", oracle.to64(q), oracle.to64(k)) * scale).max()


@pytest.mark.parametrize("scale", slow_unless(SCALES, SCALES[:1]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_exact_logits(kernel, scale):
    q, k, v, g = exact_arrays(7, *SHAPES, spread=3.3)
    assert largest_logit(q, k, scale) > (1e4 if scale == 0.5 else 2e3)
    f, given, want = kernel(q, k, v, g, scale)
    for got, right in zip(pulled(f, given[-1], *given[:-1]), want, strict=True):
        assert oracle.distance(got, right) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rounded_logits(kernel, scale, dtype):
    q, k, v, g = arrays(7, dtype, *SHAPES, spread=3.3)
    assert largest_logit(q, k, scale) > 1e3
    f, given, want = kernel(q, k, v, g, scale)
    _, _, shaken = kernel(q, k, v, g, scale, see=oracle.rounded)
    for got, right, other in zip(pulled(f, given[-1], *given[:-1]), want, shaken, strict=True):
        tolerance = max(1e-5, ROUNDING * oracle.distance(other, right)) if dtype == jnp.float32 else 1e-2
        assert tolerance <= 1e-2
        assert oracle.distance(got, right) < tolerance


def test_one_rounding_of_the_logits_may_cost_more_than_1e5():
    inputs = (*arrays(7, jnp.float32, *SHAPES, spread=3.3), 0.5)
    (_, _, want), (_, _, shaken) = few_to_many(*inputs), few_to_many(*inputs, see=oracle.rounded)
    assert max(oracle.distance(x, y) for x, y in zip(shaken, want)) > 1e-5
