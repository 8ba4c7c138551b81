"""Biases by distance in the block-sparse kernels, interpreted on a CPU, against a dense float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import DistanceTable, Slopes, block_attention
from pallas_kernels.tpu.block import plan
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays

SLOPES = np.float32([0.25, -0.03125, 0.01, 0.5])


def table(heads, distances):
    return np.random.default_rng(7).standard_normal((heads, distances)).astype(np.float32)


def check(
    kind,
    rows,
    lengths,
    heads,
    *,
    numbers=None,
    first=0,
    blocks=(128, 128),
    offset=(0, 0),
    shift=None,
    causal=False,
    dtype=jnp.float32,
    tolerance=1e-5,
    segments=None,
    **options,
):
    (queries, keys), (count, groups, head_dim) = lengths, heads
    shapes = [
        (1, n, h, head_dim) for n, h in ((queries, count), (keys, groups), (keys, groups), (queries, count))
    ]
    q, k, v, g = arrays(0, dtype, *shapes, spread=0.5)
    (g_log_sum,) = arrays(1, jnp.float32, (1, queries, count))
    numbers = SLOPES[:count] if numbers is None else numbers
    place_q = np.arange(queries)[:, None] + offset[0] + (0 if shift is None else shift)
    place_k = np.arange(keys)[None] + offset[1]
    seen = np.zeros((queries, keys), bool)
    for number, row in enumerate(rows):
        for other in row:
            seen[number * blocks[0] :, other * blocks[1] : (other + 1) * blocks[1]][: blocks[0]] = True
    if causal:
        seen &= place_k <= place_q
    if segments is not None:
        seen &= segments[0][0][:, None] == segments[1][0][None]
        options |= {
            "query_segment_ids": jnp.asarray(segments[0]),
            "key_segment_ids": jnp.asarray(segments[1]),
        }
    bias, pull_bias = oracle.by_distance(kind, numbers, first, place_q - place_k)
    g_log_sum = jnp.where(jnp.asarray(seen.any(-1))[None, :, None], g_log_sum, 0.0)

    @jax.jit
    def run(q, k, v, numbers, shift):
        def f(q, k, v, numbers):
            bias = Slopes(numbers) if kind == "slopes" else DistanceTable(numbers, first)
            return block_attention(
                q,
                k,
                v,
                bias=bias,
                key_blocks=rows,
                block_q=blocks[0],
                block_k=blocks[1],
                query_position=offset[0],
                key_position=offset[1],
                shift=shift,
                causal=causal,
                return_log_sum_exp=True,
                **{"interpret": True} | options,
            )

        (out, log_sum), pull = jax.vjp(f, q, k, v, numbers)
        return log_sum, out, *pull((g, g_log_sum))

    log_sum, *got = run(q, k, v, jnp.asarray(numbers), None if shift is None else jnp.int32(shift))
    out, want_log_sum, *grads, grad_bias = oracle.attention(
        q, k, v, seen[None], head_dim**-0.5, g, g_log_sum, bias=bias[None]
    )
    distances = [oracle.distance(x, y) for x, y in zip(got, (out, *grads, pull_bias(grad_bias)), strict=True)]
    assert max(distances) < tolerance, distances
    close = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(log_sum), want_log_sum, rtol=close, atol=close)


CAUSAL = [[0], [1, 0], [2, 0, 1]]
EVERY = [[0, 1, 2]] * 3


def test_slopes_causal_with_offset():
    """Grouped heads that share a tile, ragged lengths, positions that begin anywhere."""
    check("slopes", CAUSAL, (300, 310), (4, 2, 64), causal=True, offset=(13, 5))


def test_slopes_on_both_sides_and_unequal_blocks():
    check("slopes", [[0, 1]] * 3, (300, 400), (2, 1, 128), blocks=(128, 256))


@pytest.mark.parametrize("first", [-20, -300])
def test_table_on_both_sides(first):
    """Shorter than a block, and longer than one, with far pairs of blocks whose distances all share a number."""
    check("table", EVERY, (300, 380), (2, 2, 64), numbers=table(2, 1 - 2 * first), first=first)


def test_table_causal_at_a_position_known_at_run_time():
    """Three heads, the last of which fills half of a tile."""
    check(
        "table",
        EVERY[:2],
        (200, 380),
        (3, 1, 64),
        numbers=table(3, 140),
        causal=True,
        offset=(100, 3),
        shift=77,
    )


@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_bfloat16_in_segments(kind):
    ids = np.arange(384)[None] // 150
    numbers = SLOPES[:1] if kind == "slopes" else table(1, 301)
    options = {"segments": (ids[:, :300], ids[:, :380]), "dtype": jnp.bfloat16, "tolerance": 1e-2}
    check(kind, EVERY, (300, 380), (1, 1, 128), numbers=numbers, first=-150, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_lists_in_pieces_and_poisoned_memory(kind, monkeypatch, hostile):
    """The gradients of the launches add up; a block of queries without keys, a step without work."""
    monkeypatch.setattr(plan, "MAX_PAIRS", 3)
    numbers = SLOPES[:2] if kind == "slopes" else table(2, 200)
    check(
        kind,
        [[0], [], [1, 0], [3, 2]],
        (500, 400),
        (2, 1, 64),
        numbers=numbers,
        causal=True,
        interpret=hostile,
    )


@pytest.mark.slow
def test_table_in_blocks_larger_than_its_tiles():
    check("table", [[0, 1]] * 2, (500, 600), (2, 1, 64), numbers=table(2, 100), first=-50, blocks=(256, 384))


def test_minus_infinity_hides():
    """Distances whose number is -inf, as in a table that is a window."""
    numbers = np.where(np.arange(41) % 2 == 0, -np.inf, table(1, 41)).astype(np.float32)
    q, k, v, g = arrays(0, jnp.float32, *[(1, 200, 1, 64)] * 4)
    bias, _ = oracle.by_distance("table", numbers, -20, np.arange(200)[:, None] - np.arange(200)[None])
    seen = np.isfinite(bias)
    want = oracle.attention(q, k, v, seen, 0.125, g, bias=np.where(seen, bias, 0.0)[None])
    f = functools.partial(
        block_attention,
        key_blocks=[[0, 1]] * 2,
        block_q=128,
        block_k=128,
        bias=DistanceTable(numbers, -20),
        interpret=True,
    )
    out, pull = jax.vjp(f, q, k, v)
    assert max(oracle.distance(x, y) for x, y in zip((out, *pull(g)), (want[0], *want[2:5]))) < 1e-5


@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_causal_bit_for_bit(kind):
    numbers = SLOPES[:1] if kind == "slopes" else table(1, 30)
    bias = Slopes(numbers) if kind == "slopes" else DistanceTable(numbers, 0)
    q, k, v = arrays(0, jnp.float32, *[(1, 300, 1, 64)] * 3)
    f = jax.jit(
        functools.partial(
            block_attention,
            key_blocks=CAUSAL,
            block_q=128,
            block_k=128,
            causal=True,
            bias=bias,
            interpret=True,
        )
    )
    before = f(q, k, v)
    for at in (1, 127, 128, 299):
        after = f(*(x.at[:, at:].add(3.0) for x in (q, k, v)))
        assert (after[:, :at] == before[:, :at]).all()
        assert not (after[:, at:] == before[:, at:]).all()


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (Slopes(np.ones(2, np.float32)), r"Slopes must have shape \(1,\), got \(2,\)"),
        (
            DistanceTable(np.ones(1, np.float32), 0),
            r"DistanceTable must have shape \(1, distances\), got \(1,\)",
        ),
        (DistanceTable(np.ones((1, 1 << 20), np.float32), 0), r"needs [0-9.]+ MiB of VMEM"),
    ],
)
def test_bad_input(bias, words):
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)
    f = functools.partial(block_attention, key_blocks=[[0]], block_q=128, block_k=128, bias=bias)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(f, q, q, q)
