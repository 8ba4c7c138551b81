"""Biases by distance in the sliding-window kernels, interpreted on a CPU, against a dense float64 reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import DistanceTable, Slopes, WindowBlocks, window_attention
from tests.oracles import attention as oracles
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays

SLOPES = np.float32([0.25, -0.03125, 0.01, 0.5])
SMALL = WindowBlocks(tile=128, block=256, backward_tile=128, backward_block=256)
SLOW = pytest.mark.slow


def table(heads, distances):
    return np.random.default_rng(7).standard_normal((heads, distances)).astype(np.float32)


def made(kind, numbers, first):
    return Slopes(numbers) if kind == "slopes" else DistanceTable(numbers, first)


def check(
    kind,
    case,
    *,
    numbers=None,
    first=0,
    dtype=jnp.float32,
    tolerance=1e-5,
    seen=True,
    batch=1,
    poison=None,
    **options,
):
    """Outputs, log-sum-exps and gradients of one call; `seen` is what hides keys beside the window."""
    length, heads, groups, head_dim, left, right = case
    shapes = [(batch, length, h, head_dim) for h in (heads, groups, groups, heads)]
    q, k, v, g = arrays(0, dtype, *shapes, spread=0.5)
    (g_log_sum,) = arrays(1, jnp.float32, (batch, length, heads))
    numbers = SLOPES[:heads] if numbers is None else numbers
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    bias, pull_bias = oracle.by_distance(kind, numbers, first, distance)
    seen = seen & ((distance <= left) & (distance >= -right))[None]
    by_head = seen[:, None] & np.isfinite(bias)[None]
    g_log_sum = jnp.where(jnp.asarray(by_head.any(-1)).swapaxes(1, 2), g_log_sum, 0.0)
    out, want_log_sum, *grads, grad_bias = oracle.attention(
        q, k, v, seen, head_dim**-0.5, g, g_log_sum, bias=bias[None]
    )
    if poison is not None:
        q, k, v = poison(q, k, v)

    @jax.jit
    def run(q, k, v, numbers):
        def f(q, k, v, numbers):
            static = {"left": left, "right": right, "blocks": SMALL, "chip": "v5e", "interpret": True}
            bias = made(kind, numbers, first)
            return window_attention(q, k, v, bias=bias, return_log_sum_exp=True, **static | options)

        (out, log_sum), pull = jax.vjp(f, q, k, v, numbers)
        return log_sum, out, *pull((g, g_log_sum))

    log_sum, *got = run(q, k, v, jnp.asarray(numbers))
    want = (out, *grads, pull_bias(grad_bias))
    distances = [oracle.distance(x, y) for x, y in zip(got, want, strict=True)]
    assert max(distances) < tolerance, distances
    close = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(log_sum), want_log_sum, rtol=close, atol=close)


CASES = [
    # length, heads, key heads, head_dim, left, right
    pytest.param((600, 1, 1, 128, 127, 0), id="causal, folded, ragged"),
    pytest.param((270, 2, 2, 64, 150, 0), id="two heads in a tile, window of no round size", marks=SLOW),
    pytest.param((261, 4, 2, 64, 60, 70), id="grouped heads in a tile, both sides, ragged"),
    pytest.param((384, 4, 2, 128, 255, 0), id="grouped heads"),
    pytest.param((140, 3, 3, 48, 33, 5), id="odd head count and head dim", marks=SLOW),
    pytest.param((300, 1, 1, 256, 200, 1), id="widest head", marks=SLOW),
    pytest.param((7, 1, 1, 128, 3, 3), id="shorter than a tile", marks=SLOW),
    pytest.param((1, 2, 1, 64, 0, 0), id="one token"),
]


@pytest.mark.parametrize("case", CASES)
def test_slopes(case):
    check("slopes", case)


@pytest.mark.parametrize("case", CASES)
def test_table_that_ends_inside_the_window(case):
    check("table", case, numbers=table(case[1], 41), first=-20)


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(-300, 700, id="longer than the window"),
        pytest.param(300, 5, id="past the window", marks=SLOW),
        pytest.param(-305, 5, id="before the window", marks=SLOW),
    ],
)
def test_table_of_other_distances(first, count):
    check("table", (300, 2, 1, 64, 90, 20), numbers=table(2, count), first=first)


@pytest.mark.parametrize("kind", ["slopes", pytest.param("table", marks=SLOW)])
@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ((700, 2, 1, 128, 300, 0), WindowBlocks(256, 512, 256, 512)),
        pytest.param((520, 2, 2, 64, 100, 30), WindowBlocks(128, 128, 256, 256), marks=SLOW),
    ],
)
def test_tiles_of_two_registers(kind, case, blocks):
    """Also in one pass alone."""
    numbers = SLOPES[:2] if kind == "slopes" else table(2, 200)
    check(kind, case, numbers=numbers, first=-50, blocks=blocks)


@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_bfloat16_in_segments_with_lengths_and_poison(kind):
    """Packed and padded rows see only their own segment, whatever absent tokens hold; their gradients of the bias
    add up."""
    length, heads, batch = 300, 2, 2
    numbers = SLOPES[:heads] if kind == "slopes" else table(heads, 61)
    segments = np.sort(np.random.default_rng(0).integers(0, 4, (batch, length)), axis=1)
    query_lengths, key_lengths = np.int32([length, 250]), np.int32([201, 180])
    seen = segments[:, :, None] == segments[:, None]
    seen &= (np.arange(length)[None] < query_lengths[:, None])[:, :, None]
    seen &= (np.arange(length)[None] < key_lengths[:, None])[:, None]
    assert not seen.any(-1).all()

    def poison(q, k, v):
        absent_query, absent_key = (
            np.arange(length)[None, :, None, None] >= lengths[:, None, None, None]
            for lengths in (query_lengths, key_lengths)
        )
        q = jnp.where(absent_query, jnp.nan, q)
        return q, *(jnp.where(absent_key, jnp.nan, x) for x in (k, v))

    check(
        kind,
        (length, heads, 1, 64, 90, 20),
        numbers=numbers,
        first=-30,
        batch=batch,
        seen=seen,
        poison=poison,
        dtype=jnp.bfloat16,
        tolerance=1e-2,
        query_segment_ids=jnp.asarray(segments, jnp.int32),
        key_segment_ids=jnp.asarray(segments, jnp.int32),
        query_lengths=jnp.asarray(query_lengths),
        key_lengths=jnp.asarray(key_lengths),
    )


@pytest.mark.parametrize("kind", ["slopes", pytest.param("table", marks=SLOW)])
def test_bias_is_added_after_the_cap(kind):
    q, k, v, g = (2 * x for x in arrays(0, jnp.float32, *[(1, 150, 1, 128)] * 4))
    numbers = SLOPES[:1] if kind == "slopes" else table(1, 41)
    distance = np.arange(150)[:, None] - np.arange(150)[None]
    bias, pull_bias = oracle.by_distance(kind, numbers, -20, distance)
    given = (q, k, v, (distance >= 0) & (distance <= 40))
    want, _ = oracles.softmax_attention(*given, bias=bias[None], cap=2.0)
    *want_grads, changes = oracles.softmax_attention_gradients(*given, g, bias=bias[None], cap=2.0)
    options = {"left": 40, "right": 0, "logits_soft_cap": 2.0, "blocks": SMALL, "chip": "v5e"}

    def f(q, k, v, x):
        return window_attention(q, k, v, bias=made(kind, x, -20), interpret=True, **options)

    out, pull = jax.vjp(f, q, k, v, jnp.asarray(numbers))
    expected = (want, *want_grads, pull_bias(changes))
    assert max(oracle.distance(x, y) for x, y in zip((out, *pull(g)), expected, strict=True)) < 1e-5


@pytest.mark.parametrize("all_of_one_head", [False, pytest.param(True, marks=SLOW)])
def test_minus_infinity_hides(all_of_one_head):
    """Distances whose number is -inf, as in a table that is a narrower window; queries that see no key give 0."""
    numbers = np.where(np.arange(41) % 2 == 0, -np.inf, table(2, 41)).astype(np.float32)
    if all_of_one_head:
        numbers[1] = -np.inf
    left, right, length = 25, 25, 200
    q, k, v, g = arrays(0, jnp.float32, *[(1, length, 2, 64)] * 4)
    offset = np.arange(length)[:, None] - np.arange(length)[None]
    bias, pull_bias = oracle.by_distance("table", np.where(np.isfinite(numbers), numbers, 0.0), -20, offset)
    hidden, _ = oracle.by_distance("table", (~np.isfinite(numbers)).astype(np.float32), -20, offset)
    f = functools.partial(window_attention, left=left, right=right, blocks=SMALL, interpret=True, chip="v5e")
    out, pull = jax.vjp(
        lambda q, k, v, x: f(q, k, v, bias=DistanceTable(x, -20)), q, k, v, jnp.asarray(numbers)
    )
    grads = pull(g)
    for head in range(2):
        seen = (hidden[head] == 0) & (offset <= left) & (offset >= -right)
        mine = [x[:, :, head : head + 1] for x in (q, k, v)]
        want, _, *of_arrays, of_bias = oracle.attention(
            *mine, seen[None], 0.125, g[:, :, head : head + 1], bias=bias[None, head : head + 1]
        )
        got = [x[:, :, head : head + 1] for x in (out, *grads[:3])]
        assert max(oracle.distance(x, y) for x, y in zip(got, (want, *of_arrays), strict=True)) < 1e-5
        both = np.zeros((1, 2, length, length))
        both[:, head] = of_bias[0, 0]
        want_numbers = np.where(np.isfinite(numbers[head]), pull_bias(both)[head], 0.0)
        assert oracle.distance(grads[3][head], want_numbers) < 1e-5


@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_causal_bit_for_bit(kind):
    """Changing token t changes no output before t."""
    bias = made(kind, SLOPES[:1] if kind == "slopes" else table(1, 30), 0)
    q, k, v = arrays(0, jnp.float32, *[(1, 300, 1, 64)] * 3)
    f = functools.partial(window_attention, left=70, right=0, bias=bias, blocks=SMALL, interpret=True)
    f = jax.jit(f)
    before = f(q, k, v)
    for at in (1, 127, 128, 299):
        after = f(*(x.at[:, at:].add(3.0) for x in (q, k, v)))
        assert (after[:, :at] == before[:, :at]).all()
        assert not (after[:, at:] == before[:, at:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [(520, 4, 2, 128, 140, 0), (300, 2, 1, 128, 90, 20), (600, 4, 4, 64, 140, 0)]
)
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_poisoned_memory_and_any_order(kind, case, hostile):
    numbers = SLOPES[: case[1]] if kind == "slopes" else table(case[1], 61)
    check(kind, case, numbers=numbers, first=-20, batch=2, interpret=hostile)


@pytest.mark.slow
def test_composes():
    """vmap, remat and scan around the call agree with a loop of plain calls, whose slopes differ."""
    q, k, v = arrays(6, jnp.float32, *[(2, 2, 130, 1, 128)] * 3)
    slopes = jnp.asarray(SLOPES[:2, None])

    def loss(q, k, v, slopes):
        out = window_attention(q, k, v, left=30, right=0, bias=Slopes(slopes), blocks=SMALL, interpret=True)
        return jnp.sum(jnp.sin(out))

    every = (0, 1, 2, 3)
    once = jax.jit(jax.grad(loss, every))
    want = [once(q[i], k[i], v[i], slopes[i]) for i in range(2)]

    def scanned(*xs):
        return jax.lax.scan(lambda s, x: (s + jax.checkpoint(loss)(*x), None), 0.0, xs)[0]

    for f in (jax.vmap(jax.grad(loss, every)), jax.grad(scanned, every)):
        got = jax.jit(f)(q, k, v, slopes)
        for i in range(2):
            for x, y in zip(got, want[i]):
                np.testing.assert_allclose(np.asarray(x[i]), np.asarray(y), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (Slopes(np.ones(2, np.float32)), r"Slopes must have shape \(1,\), got \(2,\)"),
        (
            DistanceTable(np.ones(1, np.float32), 0),
            r"DistanceTable must have shape \(1, distances\), got \(1,\)",
        ),
    ],
)
def test_bad_input(bias, words):
    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(window_attention, left=3, right=0, bias=bias), q, q, q)
