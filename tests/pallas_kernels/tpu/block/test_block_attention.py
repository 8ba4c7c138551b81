"""The block-sparse kernels, interpreted on a CPU, against a dense float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import Granules, block_attention
from pallas_kernels.tpu.block import plan
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays


def causal(queries, keys):
    return keys <= queries


def dilated(queries, keys):
    """Every third of the 150 keys on both sides."""
    return (abs(queries - keys) <= 150) & (abs(queries - keys) % 3 == 0)


def dense_mask(rows, block_q, block_k, queries, keys, mask):
    seen = np.zeros((queries, keys), bool)
    for q, row in enumerate(rows):
        for k in row:
            seen[q * block_q : (q + 1) * block_q, k * block_k : (k + 1) * block_k] = True
    if mask is not None:
        seen &= np.asarray(mask(np.arange(queries)[:, None], np.arange(keys)[None, :]))
    return seen[None]


def check(
    rows,
    lengths,
    heads,
    dtype=jnp.float32,
    tolerance=1e-5,
    mask=None,
    blocks=(128, 128),
    masked=True,
    **options,
):
    """Compares with the reference under `mask`, which the kernel gets too, unless `options` express it otherwise."""
    (queries, keys), (count, groups, head_dim) = lengths, heads
    q, k, v, g = arrays(
        0,
        dtype,
        (1, queries, count, head_dim),
        (1, keys, groups, head_dim),
        (1, keys, groups, head_dim),
        (1, queries, count, head_dim),
        spread=1.0,
    )
    (g_log_sum,) = arrays(1, jnp.float32, (1, queries, count))
    seen = dense_mask(rows, *blocks, queries, keys, mask)
    # The log-sum-exp of a row that sees nothing has no gradient.
    g_log_sum = jnp.where(jnp.asarray(seen.any(-1))[:, :, None], g_log_sum, 0.0)

    @jax.jit
    def run(q, k, v, g, g_log_sum):
        f = functools.partial(
            block_attention,
            key_blocks=rows,
            block_q=blocks[0],
            block_k=blocks[1],
            mask=mask if masked else None,
            return_log_sum_exp=True,
            **{"interpret": True} | options,
        )
        (out, log_sum), pull = jax.vjp(f, q, k, v)
        return log_sum, out, *pull((g, g_log_sum))

    log_sum, *got = run(q, k, v, g, g_log_sum)
    out, want_log_sum, *grads = oracle.attention(q, k, v, seen, head_dim**-0.5, g, g_log_sum)
    distances = [oracle.distance(x, y) for x, y in zip(got, (out, *grads))]
    assert max(distances) < tolerance, distances
    np.testing.assert_allclose(np.asarray(log_sum), want_log_sum, rtol=1e-5 if dtype == jnp.float32 else 2e-2)


def test_causal_with_holes_grouped_ragged():
    """Lists in any order, a block of queries without keys and keys that nobody reads."""
    check([[0], [2, 0], [], [3, 1]], (400, 500), (2, 1, 128), mask=causal)


def test_two_heads_in_a_tile_and_unequal_blocks():
    check([[0], [1, 0], [2]], (300, 700), (2, 2, 64), blocks=(128, 256))


def test_dilated_in_bfloat16():
    rows = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]
    check(rows, (512, 512), (1, 1, 128), jnp.bfloat16, 1e-2, mask=dilated)


@pytest.mark.slow
def test_poisoned_memory_and_any_order(hostile):
    check([[0], [], [1]], (300, 200), (2, 1, 128), mask=causal, interpret=hostile)


@pytest.mark.slow
def test_poisoned_memory_with_bits(hostile):
    """Granules of 100 positions, up to 3 in a block: only the second sees and is seen; a narrow head's shared tile."""
    bits = Granules(100, ((1 << 3 * 1 + 1,), (1 << 3 * 0 + 1,)))
    sees = lambda queries, keys: (queries >= 100) & (queries < 200) & (keys >= 100)  # noqa: E731
    check([[0], [0]], (256, 128), (2, 1, 64), mask=sees, masked=False, granules=bits, interpret=hostile)


@pytest.mark.slow
def test_lists_in_pieces(monkeypatch):
    """Lists that do not fit in scalar memory at once, forward and by keys; a single list that is too long is an
    error."""
    rows = [[0], [0, 1], [], [1, 2, 3], [4]]
    monkeypatch.setattr(plan, "MAX_PAIRS", 3)
    check(rows, (600, 600), (2, 1, 64), mask=causal)
    monkeypatch.setattr(plan, "MAX_PAIRS", 2)
    with pytest.raises(ValueError, match="a block of queries meets 3 others, scalar memory holds 2"):
        check(rows, (600, 600), (2, 1, 64))


def test_segments_lengths_and_poison():
    q, k, v, g = arrays(3, jnp.float32, *[(2, 256, 1, 64)] * 4)
    segments = jnp.asarray(np.arange(256) // 70 + np.zeros((2, 1)), jnp.int32)
    query_lengths, key_lengths = jnp.asarray([256, 130], jnp.int32), jnp.asarray([200, 0], jnp.int32)
    at = np.arange(256)
    seen = np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None, :]
    seen &= (at < np.asarray(query_lengths)[:, None])[:, :, None]
    seen &= (at < np.asarray(key_lengths)[:, None])[:, None, :]
    want = oracle.attention(q, k, v, seen, 0.125, g)
    k, v = (jnp.where((at >= np.asarray(key_lengths)[:, None])[:, :, None, None], jnp.nan, x) for x in (k, v))
    f = functools.partial(
        block_attention,
        key_blocks=[[0, 1], [0, 1]],
        block_q=128,
        block_k=128,
        query_segment_ids=segments,
        key_segment_ids=segments,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        interpret=True,
    )

    @jax.jit
    def run(q, k, v, g):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(g)

    got = run(q, k, v, g)
    assert max(oracle.distance(x, y) for x, y in zip(got, (want[0], *want[2:]))) < 1e-5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"key_blocks": [[0], [3], [1]]},
            r"key_blocks\[1\] must name blocks from 0 to 2, each once, got \[3\]",
        ),
        ({"key_blocks": [[0, 0], [1], [1]]}, r"key_blocks\[0\] must name blocks from 0 to 2, each once"),
        ({"block_k": 100}, "block_k must be a positive multiple of 128, got 100"),
    ],
)
def test_bad_input(change, words):
    q = jax.ShapeDtypeStruct((1, 300, 1, 64), jnp.float32)
    options = {"key_blocks": [[0], [0], [0]], "block_q": 128, "block_k": 128} | change
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(block_attention, **options), q, q, q)
