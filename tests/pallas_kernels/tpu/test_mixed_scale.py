"""Tokens of mixed scale, logits up to 1e4: every kernel's outputs and gradients, forward and backward.

In float32 an error of the logits' last bit is an error of 1e-3 in a weight where the logits are 1e4. So a result may be
off by 1e-5 of its norm, or by what rounding the exact logits once to float32 costs, times the square root of the 128
terms that each logit sums.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import block_attention, compress, compress_blocks, propagate, window_attention
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays, quick_jit

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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scale", [HEAD_DIM**-0.5, 0.5])
@pytest.mark.parametrize("kernel", [window, blocks, few_to_many, contrast, histories])
def test_matches_reference(kernel, scale, dtype):
    q, k, v, g = arrays(7, dtype, *[(1, LENGTH, 1, HEAD_DIM)] * 4, spread=3.3)
    assert np.abs(np.einsum("btnh,bsnh->bts", oracle.to64(q), oracle.to64(k)) * scale).max() > 1e3
    f, given, want = kernel(q, k, v, g, scale)
    _, _, shaken = kernel(q, k, v, g, scale, see=oracle.rounded)

    @quick_jit
    def run(given):
        out, pull = jax.vjp(f, *given[:-1])
        return out, *pull(given[-1])

    for got, right, other in zip(run(given), want, shaken, strict=True):
        least = float(np.linalg.norm(other - right) / np.linalg.norm(right))
        tolerance = max(1e-5, ROUNDING * least) if dtype == jnp.float32 else 1e-2
        assert tolerance <= 1e-2
        assert oracle.distance(got, right) < tolerance
