"""The sliding-window kernels with and without biases by distance, interpreted on a CPU, against dense float64."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import DistanceTable, Slopes, WindowBlocks, window_attention
from pallas_kernels.tpu.core.chips import resolve_chip
from tests.oracles import kernels as oracle
from tests.pallas_kernels.tpu.inputs import SLOPES, arrays, bias_by_distance, table
from tests.support.attention import pulled

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
SMALL = WindowBlocks(tile=128, block=256, backward_tile=128, backward_block=256)
SLOW = pytest.mark.slow
KINDS = (None, "slopes", "table")


def check(
    case,
    kind=None,
    *,
    batch=1,
    dtype=jnp.float32,
    numbers=None,
    first=0,
    spread=0.5,
    scale=None,
    seen=True,
    poison=None,
    with_log_sum=True,
    cap=None,
    **options,
):
    """Compares outputs, log-sum-exps and gradients of one call; `seen` hides more keys than the window does."""
    length, heads, groups, head_dim, left, right = case
    shapes = [(batch, length, h, head_dim) for h in (heads, groups, groups, heads)]
    q, k, v, g = arrays(0, dtype, *shapes, spread=spread)
    (g_log_sum,) = arrays(1, jnp.float32, (batch, length, heads))
    numbers = SLOPES[:heads] if numbers is None else numbers
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    seen = seen & ((distance <= left) & (distance >= -right))[None]
    bias = pull_bias = None
    if kind is not None:
        bias, pull_bias = oracle.by_distance(kind, numbers, first, distance)
    g_log_sum = jnp.where(jnp.asarray(seen.any(-1))[:, :, None], g_log_sum, 0.0)
    want, want_log_sum, *want_grads = oracle.attention(
        q, k, v, seen, head_dim**-0.5 if scale is None else scale, g, g_log_sum if with_log_sum else None,
        bias=None if kind is None else bias[None], cap=cap,
    )  # fmt: skip
    if kind is not None:
        want_grads[3] = pull_bias(want_grads[3])
    if poison is not None:
        q, k, v = poison(q, k, v)

    def f(q, k, v, numbers):
        # Windows in float32 need more VMEM than some chips have.
        static = {"left": left, "right": right, "blocks": SMALL, "chip": "v5e", "interpret": True}
        static |= {"scale": scale, "return_log_sum_exp": with_log_sum, "logits_soft_cap": cap} | options
        return window_attention(q, k, v, bias=bias_by_distance(kind, numbers, first), **static)

    out, *grads = pulled(f, (g, g_log_sum) if with_log_sum else g, q, k, v, jnp.asarray(numbers))
    if with_log_sum:
        out, log_sum = out
        close = 1e-5 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.asarray(log_sum), want_log_sum, rtol=close, atol=close)
    assert {x.dtype for x in (out, *grads[:3])} == {jnp.dtype(dtype)}
    assert not np.asarray(out)[~np.broadcast_to(seen.any(-1), out.shape[:2])].any()
    got = (out, *grads[:3]) if kind is None else (out, *grads)
    oracle.check(got, (want, *want_grads), TOLERANCE[dtype])


CASES = [
    # length, heads, key heads, head_dim, left, right
    pytest.param((600, 1, 1, 128, 127, 0), id="causal, folded, ragged"),
    pytest.param((270, 2, 2, 64, 150, 0), id="two heads in a tile, window of no round size", marks=SLOW),
    pytest.param((261, 4, 2, 64, 60, 70), id="grouped heads in a tile, both sides, ragged"),
    pytest.param((384, 4, 2, 128, 255, 0), id="grouped heads, folded", marks=SLOW),
    pytest.param((140, 3, 3, 48, 33, 5), id="odd head count and head dim"),
    pytest.param((100, 6, 2, 32, 33, 0), id="a group that does not fill a tile", marks=SLOW),
    pytest.param((300, 1, 1, 256, 256, 1), id="widest head", marks=SLOW),
    pytest.param((7, 1, 1, 128, 3, 3), id="shorter than a tile", marks=SLOW),
    pytest.param((1, 2, 1, 64, 0, 0), id="one token"),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference_in_float32(case, kind):
    """A table ends inside the window."""
    numbers = np.resize(SLOPES, case[1]) if kind != "table" else table(case[1], 41)
    check(case, kind, numbers=numbers, first=-20, with_log_sum=kind is not None)


@pytest.mark.parametrize("case", [CASES[0], pytest.param(*CASES[2].values, id=CASES[2].id, marks=SLOW)])
def test_matches_reference_in_bfloat16(case):
    check(case, dtype=jnp.bfloat16, spread=1.0, batch=2, with_log_sum=False)


def test_log_sum_exp_and_its_gradient():
    check((200, 2, 2, 64, 40, 0), spread=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale):
    check((128, 1, 1, 128, 40, 0), scale=scale, spread=0.0)


def test_huge_logits():
    """With scores up to 1e4 the softmax is almost one-hot, and float32 scores have rounding errors in proportion."""
    check((256, 1, 1, 128, 127, 0), spread=3.4, with_log_sum=False)


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(-300, 700, id="longer than the window"),
        pytest.param(300, 5, id="past the window", marks=SLOW),
        pytest.param(-305, 5, id="before the window", marks=SLOW),
    ],
)
def test_table_of_other_distances(first, count):
    check((300, 2, 1, 64, 90, 20), "table", numbers=table(2, count), first=first)


@pytest.mark.parametrize("kind", ["slopes", pytest.param("table", marks=SLOW)])
@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ((700, 2, 1, 128, 300, 0), WindowBlocks(256, 512, 256, 512)),
        pytest.param((520, 2, 2, 64, 100, 30), WindowBlocks(128, 128, 256, 256), marks=SLOW),
    ],
)
def test_tiles_of_two_registers(kind, case, blocks):
    """Also in a single pass."""
    numbers = SLOPES[:2] if kind == "slopes" else table(2, 200)
    check(case, kind, numbers=numbers, first=-50, blocks=blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [(None, jnp.float32), ("slopes", jnp.bfloat16), ("table", jnp.bfloat16)]
)
def test_segments_lengths_and_poison(kind, dtype):
    """Packed and padded rows see only their own segment, whatever absent tokens hold. Empty rows give 0, and the
    gradients of the bias add up."""
    length, batch = 300, 2
    numbers = SLOPES[:2] if kind != "table" else table(2, 61)
    segments = np.sort(np.random.default_rng(0).integers(0, 4, (batch, length)), axis=1)
    # Row 0's last segment begins at token 209: its queries see no key, but other segments' keys are in their tiles.
    query_lengths, key_lengths = np.int32([length, 250]), np.int32([201, 0 if kind is None else 180])
    there_q, there_k = (
        np.arange(length)[None] < lengths[:, None] for lengths in (query_lengths, key_lengths)
    )
    seen = (segments[:, :, None] == segments[:, None]) & there_q[:, :, None] & there_k[:, None]
    assert not seen[0, 209:].any()

    def poison(q, k, v):
        absent = [~there[:, :, None, None] for there in (there_q, there_k, there_k)]
        return (jnp.where(here, jnp.nan, x) for here, x in zip(absent, (q, k, v)))

    check(
        (length, 2, 1, 64, 90, 20), kind, numbers=numbers, first=-30, batch=batch, dtype=dtype, seen=seen,
        poison=poison,
        query_segment_ids=jnp.asarray(segments, jnp.int32), key_segment_ids=jnp.asarray(segments, jnp.int32),
        query_lengths=jnp.asarray(query_lengths), key_lengths=jnp.asarray(key_lengths),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["slopes", pytest.param("table", marks=SLOW)])
def test_bias_is_added_after_the_cap(kind):
    check(
        (150, 1, 1, 128, 40, 0),
        kind,
        numbers=SLOPES[:1] if kind == "slopes" else table(1, 41),
        first=-20,
        cap=2.0,
    )


@pytest.mark.parametrize("all_of_one_head", [False, pytest.param(True, marks=SLOW)])
def test_minus_infinity_hides(all_of_one_head):
    """Distances with a bias of -inf, as in a table for a narrower window; queries that see no key give 0."""
    numbers = np.where(np.arange(41) % 2 == 0, -np.inf, table(2, 41)).astype(np.float32)
    if all_of_one_head:
        numbers[1] = -np.inf
    left, right, length = 25, 25, 200
    q, k, v, g = arrays(0, jnp.float32, *[(1, length, 2, 64)] * 4)
    offset = np.arange(length)[:, None] - np.arange(length)[None]
    bias, pull_bias = oracle.by_distance("table", np.where(np.isfinite(numbers), numbers, 0.0), -20, offset)
    hidden, _ = oracle.by_distance("table", (~np.isfinite(numbers)).astype(np.float32), -20, offset)
    f = functools.partial(window_attention, left=left, right=right, blocks=SMALL, interpret=True, chip="v5e")
    biased = lambda q, k, v, x: f(q, k, v, bias=DistanceTable(x, -20))  # noqa: E731
    out, *grads = pulled(biased, g, q, k, v, jnp.asarray(numbers))
    for head in range(2):
        seen = (hidden[head] == 0) & (offset <= left) & (offset >= -right)
        mine = [x[:, :, head : head + 1] for x in (q, k, v)]
        want, _, *of_arrays, of_bias = oracle.attention(
            *mine, seen[None], 0.125, g[:, :, head : head + 1], bias=bias[None, head : head + 1]
        )
        got = [x[:, :, head : head + 1] for x in (out, *grads[:3])]
        oracle.check(got, (want, *of_arrays), 1e-5)
        both = np.zeros((1, 2, length, length))
        both[:, head] = of_bias[0, 0]
        want_numbers = np.where(np.isfinite(numbers[head]), pull_bias(both)[head], 0.0)
        assert oracle.distance(grads[3][head], want_numbers) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_causal_bitwise(kind):
    """Changing the tokens from t on changes no output before t."""
    bias = bias_by_distance(kind, SLOPES[:1] if kind == "slopes" else table(1, 30), 0)
    q, k, v = arrays(5, jnp.float32, *[(1, 300, 1, 64)] * 3)
    run = jax.jit(
        functools.partial(window_attention, left=70, right=0, bias=bias, blocks=SMALL, interpret=True)
    )
    before = np.asarray(run(q, k, v))
    for t in (1, 127, 128, 200, 299):
        after = np.asarray(run(*(x.at[:, t:].add(3.0) for x in (q, k, v))))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert (before[:, t] != after[:, t]).any()


@pytest.mark.slow
@pytest.mark.parametrize("biased", [False, True])
def test_composes(biased):
    """vmap, remat and scan around the call agree with a loop of plain calls, whose slopes differ."""
    q, k, v = arrays(6, jnp.float32, *[(2, 2, 130, 1, 128)] * 3)
    given = (q, k, v, *([jnp.asarray(SLOPES[:2, None])] if biased else []))

    def loss(q, k, v, *slopes):
        bias = Slopes(*slopes) if biased else None
        out = window_attention(q, k, v, left=30, right=0, bias=bias, blocks=SMALL, interpret=True)
        return jnp.sum(jnp.sin(out))

    every = tuple(range(len(given)))
    once = jax.jit(jax.grad(loss, every))
    want = [once(*(x[i] for x in given)) for i in range(2)]

    def scanned(*xs):
        return jax.lax.scan(lambda s, x: (s + jax.checkpoint(loss)(*x), None), 0.0, xs)[0]

    for f in (jax.vmap(jax.grad(loss, every)), jax.grad(scanned, every)):
        got = jax.jit(f)(*given)
        for i in range(2):
            for x, y in zip(got, want[i]):
                np.testing.assert_allclose(np.asarray(x[i]), np.asarray(y), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((None, case) for case in ((257, 2, 1, 128, 64, 64), (520, 4, 2, 64, 140, 0), (300, 2, 1, 128, 140, 0))),
        *((kind, (520, 4, 2, 128, 140, 0)) for kind in ("slopes", "table")),
        *((kind, (300, 2, 1, 128, 90, 20)) for kind in KINDS),
        *((kind, (600, 4, 4, 64, 140, 0)) for kind in ("slopes", "table")),
    ],
)  # fmt: skip
def test_poisoned_memory_and_any_order(kind, case, hostile):
    numbers = table(case[1], 61) if kind == "table" else None
    check(case, kind, numbers=numbers, first=-20, batch=2, interpret=hostile)


def test_without_a_mesh_the_chip_is_the_process_own(monkeypatch):
    x = jnp.zeros((1,))
    assert resolve_chip(None, x) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU v6 lite")])
    assert resolve_chip(None, x) == "v6e"
    assert resolve_chip("v4", x) == "v4"
