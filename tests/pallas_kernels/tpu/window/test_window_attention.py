"""The sliding-window kernels, interpreted on a CPU, against a dense float64 reference."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import WindowBlocks, window_attention
from pallas_kernels.tpu.core.chips import resolve_chip
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays

TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2}
SMALL = WindowBlocks(tile=128, block=256, backward_tile=128, backward_block=256)


def window_mask(length, left, right):
    offset = np.arange(length)[None, :] - np.arange(length)[:, None]
    return ((offset >= -left) & (offset <= right))[None]


def check(case, dtype, *, seed=0, spread=1.0, scale=None, mask=None, with_log_sum=False, **options):
    """Output and gradients of one call against the reference."""
    batch, length, heads, groups, head_dim, left, right = case
    q, k, v, g = arrays(
        seed,
        dtype,
        (batch, length, heads, head_dim),
        (batch, length, groups, head_dim),
        (batch, length, groups, head_dim),
        (batch, length, heads, head_dim),
        spread=spread,
    )
    (g_log_sum,) = arrays(seed + 1, jnp.float32, (batch, length, heads))
    options = {"left": left, "right": right, "interpret": True, "blocks": SMALL, "scale": scale} | options
    options = {"chip": "v5e"} | options  # float32 needs more VMEM than every chip has

    @jax.jit
    def run(q, k, v, g, g_log_sum):
        f = functools.partial(window_attention, return_log_sum_exp=with_log_sum, **options)
        out, pull = jax.vjp(f, q, k, v)
        return out, pull((g, g_log_sum) if with_log_sum else g)

    out, grads = run(q, k, v, g, g_log_sum)
    mask = window_mask(length, left, right) if mask is None else mask
    scale = head_dim**-0.5 if scale is None else scale
    want, log_sum, *want_grads = oracle.attention(
        q, k, v, mask, scale, g, g_log_sum if with_log_sum else None
    )
    if with_log_sum:
        out, got_log_sum = out
        np.testing.assert_allclose(
            np.asarray(got_log_sum), log_sum, rtol=2e-2 if dtype != jnp.float32 else 1e-5
        )
    distances = [oracle.distance(x, y) for x, y in zip((out, *grads), (want, *want_grads))]
    assert max(distances) < TOLERANCE[dtype], distances
    assert out.dtype == dtype
    assert all(x.dtype == dtype for x in grads)


SLOW = pytest.mark.slow
CASES = [
    # batch, length, heads, key heads, head_dim, left, right
    pytest.param((1, 600, 1, 1, 128, 127, 0), id="causal, folded, ragged"),
    pytest.param((2, 270, 2, 2, 64, 150, 0), id="two heads in a tile, window of no round size", marks=SLOW),
    pytest.param((1, 261, 4, 2, 64, 60, 70), id="grouped heads in a tile, both sides, ragged"),
    pytest.param((1, 384, 2, 1, 128, 255, 0), id="grouped heads, folded", marks=SLOW),
    pytest.param((1, 140, 3, 3, 48, 33, 5), id="odd head count and head dim"),
    pytest.param((1, 100, 6, 2, 32, 33, 0), id="a group that does not fill a tile", marks=SLOW),
    pytest.param((1, 300, 1, 1, 256, 256, 1), id="widest head", marks=SLOW),
    pytest.param((1, 7, 1, 1, 128, 3, 3), id="shorter than a tile", marks=SLOW),
    pytest.param((1, 1, 2, 1, 64, 0, 0), id="one token"),
]


@pytest.mark.parametrize("case", CASES)
def test_matches_reference_in_float32(case):
    check(case, jnp.float32)


@pytest.mark.parametrize("case", [CASES[0], pytest.param(*CASES[2].values, id=CASES[2].id, marks=SLOW)])
def test_matches_reference_in_bfloat16(case):
    check(case, jnp.bfloat16)


def test_log_sum_exp_and_its_gradient():
    check((1, 200, 2, 2, 64, 40, 0), jnp.float32, with_log_sum=True)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale):
    check((1, 128, 1, 1, 128, 40, 0), jnp.float32, scale=scale, spread=0.0)


def test_huge_logits():
    """Scores up to 1e4: the softmax is almost one-hot, and float32 scores have rounding errors of their size."""
    check((1, 256, 1, 1, 128, 127, 0), jnp.float32, spread=3.4)


def test_segments_lengths_and_poison():
    """Packed and padded rows see only their own segment, whatever absent tokens hold; empty rows give 0."""
    batch, length, heads, head_dim, left, right = 2, 300, 2, 64, 90, 20
    q, k, v, g = arrays(3, jnp.float32, *[(batch, length, heads, head_dim)] * 4)
    segments = jnp.asarray(
        np.sort(np.random.default_rng(0).integers(0, 4, (batch, length)), axis=1), jnp.int32
    )
    # Row 0's last segment begins at token 209: its queries see no key, but other segments' keys are in their tiles.
    query_lengths, key_lengths = jnp.asarray([length, 250], jnp.int32), jnp.asarray([201, 0], jnp.int32)
    mask = window_mask(length, left, right) & (
        np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None, :]
    )
    mask &= (np.arange(length)[None] < np.asarray(query_lengths)[:, None])[:, :, None]
    mask &= (np.arange(length)[None] < np.asarray(key_lengths)[:, None])[:, None, :]
    want = oracle.attention(q, k, v, mask, 0.125, g)

    absent = jnp.arange(length)[None, :, None, None] >= key_lengths[:, None, None, None]
    k, v = (jnp.where(absent, jnp.nan, x) for x in (k, v))
    absent = jnp.arange(length)[None, :, None, None] >= query_lengths[:, None, None, None]
    q = jnp.where(absent, jnp.nan, q)

    @jax.jit
    def run(q, k, v, g):
        f = functools.partial(
            window_attention,
            left=left,
            right=right,
            query_segment_ids=segments,
            key_segment_ids=segments,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            return_log_sum_exp=True,
            blocks=SMALL,
            chip="v5e",
            interpret=True,
        )
        (out, log_sum), pull = jax.vjp(f, q, k, v)
        return out, log_sum, pull((g, jnp.zeros_like(log_sum)))

    out, log_sum, grads = run(q, k, v, g)
    assert max(oracle.distance(x, y) for x, y in zip((out, *grads), (want[0], *want[2:]))) < 1e-5
    np.testing.assert_array_equal(np.isneginf(np.asarray(log_sum)), np.isneginf(want[1]))
    assert not np.asarray(out)[1].any()
    assert (~mask.any(axis=2))[0, 209:].all()
    assert not np.asarray(out)[0, 209:].any()


def test_causal_bitwise():
    """Changing token t changes no output before t."""
    q, k, v = arrays(5, jnp.float32, *[(1, 300, 1, 128)] * 3)
    run = jax.jit(functools.partial(window_attention, left=70, right=0, blocks=SMALL, interpret=True))
    for t in (1, 128, 200, 299):
        k2, v2 = (x.at[:, t:].add(3.0) for x in (k, v))
        before, after = np.asarray(run(q, k, v)), np.asarray(run(q, k2, v2))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert (before[:, t] != after[:, t]).any()


@pytest.mark.slow
def test_composes():
    """vmap, remat and scan around the call agree with a loop of plain calls."""
    q, k, v = arrays(6, jnp.float32, *[(2, 2, 130, 1, 128)] * 3)
    plain = functools.partial(window_attention, left=30, right=0, blocks=SMALL, interpret=True)
    loss = lambda q, k, v: jnp.sum(jnp.sin(plain(q, k, v)))  # noqa: E731
    once = jax.jit(jax.grad(loss, (0, 1, 2)))
    want = [once(q[i], k[i], v[i]) for i in range(2)]

    def scanned(q, k, v):
        return jax.lax.scan(lambda s, x: (s + jax.checkpoint(loss)(*x), None), 0.0, (q, k, v))[0]

    for f in (jax.vmap(jax.grad(loss, (0, 1, 2))), jax.grad(scanned, (0, 1, 2))):
        got = jax.jit(f)(q, k, v)
        for i in range(2):
            for x, y in zip(got, want[i]):
                np.testing.assert_allclose(np.asarray(x[i]), np.asarray(y), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (2, 257, 2, 1, 128, 64, 64),
        (1, 520, 4, 2, 64, 140, 0),
        (1, 300, 2, 1, 128, 140, 0),
        (1, 300, 1, 1, 128, 90, 20),
    ],
)
def test_poisoned_memory_and_any_order(case, hostile):
    check(case, jnp.float32, interpret=hostile)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right_side", "error", "words"),
    [(64, jax.errors.JaxRuntimeError, "Revisited block"), (0, AssertionError, None)],
)
def test_order_is_declared_where_it_matters(right_side, error, words, monkeypatch):
    """The check above can fail: a backward pass that declares its sweep free of order is caught."""
    right = pltpu.CompilerParams
    monkeypatch.setattr(
        pltpu, "CompilerParams", lambda **kw: right(**kw | {"dimension_semantics": ("parallel",) * 4})
    )
    case = (1, 700, 1, 1, 128, 127, right_side)
    try:
        with pytest.raises(error, match=words):
            check(case, jnp.float32, interpret=pltpu.InterpretParams(random_seed=1))
    finally:
        pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"left": -1}, ValueError, "left must be an int of at least 0, got -1"),
        ({"chip": "v99"}, ValueError, "chip must be None or one of"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        (
            {"blocks": WindowBlocks(128, 128, 128, 128), "left": 200},
            ValueError,
            "block must hold a window side",
        ),
        ({"key_segment_ids": jnp.zeros((1, 20000), jnp.int32)}, ValueError, "belong together"),
        (
            {"key_lengths": jnp.zeros((2,), jnp.int32)},
            ValueError,
            r"key_lengths must be ints of shape \(1,\)",
        ),
    ],
)
def test_bad_input(change, error, words):
    options = {"left": 20, "right": 0} | change
    dtype, head_dim, groups = (
        options.pop(name, default)
        for name, default in (("dtype", jnp.float32), ("head_dim", 64), ("groups", 4))
    )
    q = jax.ShapeDtypeStruct((1, 20000, 4, head_dim), dtype)
    k = jax.ShapeDtypeStruct((1, 20000, groups, head_dim), dtype)
    with pytest.raises(error, match=words):
        jax.eval_shape(functools.partial(window_attention, **options), q, k, k)


def test_without_a_mesh_the_chip_is_the_process_own(monkeypatch):
    x = jnp.zeros((1,))
    assert resolve_chip(None, x) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU v6 lite")])
    assert resolve_chip(None, x) == "v6e"
    assert resolve_chip("v4", x) == "v4"
