"""local_attention against the float64 oracle, in the CPU's loop and with all blocks at once; its laws and cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import ALiBi, T5Bias, alibi_slopes
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.far_patterns import BigBird, GlobalWindow
from brl_jax.attention.local.patterns import BlockDiagonal, Bucketed, Dilated, Neighbourhood, SlidingWindow
from tests.attention.local.cases import BIG_BIRD, BOTH, PATTERNS, run, xla_attention
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import (
    assert_close,
    check_causal,
    expect,
    largest_array,
    random_qkv,
    with_padding,
)

# Fast: every pattern in the loop, causal if it can be, and one pattern of each kind with all blocks at once.
CASES = [
    pytest.param(
        name,
        schedule,
        causal,
        marks=()
        if (causal == PATTERNS[name][0].causal_ok and schedule == "loop")
        or (name, schedule) in (("strided", "at_once"), ("block_mask", "at_once"))
        else pytest.mark.slow,
    )
    for name in PATTERNS
    for schedule, causal in (("loop", False), ("loop", True), ("at_once", False))
    if PATTERNS[name][0].causal_ok or not causal
]
# Those that take a traced query_offset.
BOUNDED = [n for n, (p, _) in PATTERNS.items() if None not in p.limits]
TOLERANCE = {jnp.float32: 1e-4, jnp.bfloat16: 2e-2}


@pytest.mark.parametrize(("name", "schedule", "is_causal"), CASES, indirect=["schedule"])
def test_pattern_equals_oracle(schedule, name, is_causal):
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(130)
    got = run(*arrays, pattern=pattern, is_causal=is_causal)
    assert_close(got, expect(arrays, oracles.pairs(130, 130, sees, is_causal=is_causal)))


@pytest.mark.parametrize(
    "name", slow_unless([n for n in PATTERNS if n != "big_bird"], ("dilated", "fixed", "block_mask"))
)
@BOTH
def test_offsets_static_and_traced(schedule, name):
    """Queries after a cache whose keys don't start at 0, with offsets known (all at once) or traced (in the loop)."""
    pattern, sees = PATTERNS[name]
    causal = pattern.causal_ok
    arrays = random_qkv(30, 50)
    expected = expect(arrays, oracles.pairs(30, 50, sees, 20 + 31, 31, causal))
    key_offset = jnp.int32(31) if schedule == "loop" else 31
    got = run(*arrays, pattern=pattern, is_causal=causal, query_offset=20, key_offset=key_offset)
    assert_close(got, expected)


@pytest.mark.parametrize("name", slow_unless(BOUNDED, ("sliding", "surrounded")))
def test_traced_query_offset(name):
    """One program for all offsets of a cache, some of which leave queries without keys."""
    pattern, sees = PATTERNS[name]
    causal = name in ("sliding", "bucketed")
    arrays, bias = random_qkv(30, 50), jax.random.normal(jax.random.key(3), (1, 4, 30, 50))
    poisoned, lengths, exists = with_padding(arrays, [30, 30], [50, 41])

    @jax.jit
    def at(offset, *arrays):
        options = {"pattern": pattern, "is_causal": causal, "key_offset": jnp.int32(31), "bias": bias}
        return run(*arrays, query_offset=offset, **options, **lengths)

    for offset in (-8, 20, 46):
        visible = exists & oracles.pairs(30, 50, sees, offset + 31, 31, causal)
        assert_close(at(offset, *poisoned), expect(arrays, visible, bias=bias))


@BOTH
def test_big_bird_with_offsets(schedule):
    arrays = random_qkv(30, 50)
    sees = oracles.big_bird(8, 3, 1, BIG_BIRD.random_lists(-(-(50 + 5) // 8)))
    got = run(*arrays, pattern=BIG_BIRD, query_offset=20, key_offset=5)
    assert_close(got, expect(arrays, oracles.pairs(30, 50, sees, 25, 5)))
    with pytest.raises(ValueError, match="key_offset must be a static int with BigBird"):
        local_attention(*arrays[:3], pattern=BIG_BIRD, key_offset=jnp.int32(5))


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "offset"),
    [(5, 40, 0), (40, 5, 0), (1, 33, 32), (9, 30, -4), *((n, n, 0) for n in (1, 2, 7, 63, 257))],
)
@BOTH
def test_ragged_and_different_lengths(schedule, num_queries, num_keys, offset):
    """Also with queries after the last key and before the first: queries that see nothing give 0."""
    arrays = random_qkv(num_queries, num_keys)
    got = run(*arrays, local_window_size=(6, 2), query_offset=offset)
    visible = oracles.pairs(num_queries, num_keys, oracles.sliding(6, 2), offset, 0)
    assert_close(got, expect(arrays, visible))
    blind = ~visible.any(-1)
    for gradient in got[:2]:
        assert not np.asarray(gradient)[:, blind].any()


@pytest.mark.parametrize("name", slow_unless(["sliding", "global_window"], ("sliding",)))
@BOTH
def test_bfloat16(schedule, name):
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(130, head_dim=16, dtype=jnp.bfloat16)
    got = run(*arrays, pattern=pattern)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert_close(got, expect(arrays, oracles.pairs(130, 130, sees)), TOLERANCE[jnp.bfloat16])


@BOTH
def test_scale_and_many_heads(schedule):
    """More (sequence, head) pairs than one step of the loop processes, each with separate keys."""
    arrays = random_qkv(300, batch=3, heads=12, kv_heads=6)
    got = run(*arrays, local_window_size=(200, 0), is_causal=True, scale=0.3)
    assert_close(got, expect(arrays, oracles.pairs(300, 300, oracles.sliding(200, 0)), scale=0.3))


@pytest.mark.parametrize(
    ("name", "bias"),
    slow_unless([("sliding", "alibi"), ("strided", "t5"), ("dilated", "t5")], ("sliding", "strided")),
)
@BOTH
def test_position_bias(schedule, name, bias):
    pattern, sees = PATTERNS[name]
    rng = np.random.default_rng(3)
    if bias == "alibi":
        bias = ALiBi(alibi_slopes(4))
    else:
        bias = T5Bias(jnp.asarray(rng.standard_normal((8, 4)), jnp.float32), 32, bidirectional=True)
    arrays = random_qkv(90)
    positions = jnp.arange(90)
    dense, pull_dense = jax.vjp(lambda b: b(positions, positions), bias)
    expected = expect(arrays, oracles.pairs(90, 90, sees), bias=np.asarray(dense)[None])
    expected_bias = pull_dense(jnp.asarray(expected[4].sum(0), jnp.float32))[0]
    *got, got_bias = run(*arrays, pattern=pattern, bias=bias, by=("bias",))
    assert_close(got, expected)
    for x, y in zip(jax.tree.leaves(got_bias), jax.tree.leaves(expected_bias)):
        assert oracles.relative_error(x, y) < 1e-4


@pytest.mark.parametrize(
    ("name", "shape"),
    slow_unless(
        [
            ("sliding", (2, 4, 90, 90)),
            ("sliding", (2, 1, 90, 1)),
            ("strided", (4, 1, 90)),
            ("block_mask", (2, 4, 90, 90)),
            ("block_mask", (1, 1, 1, 90)),
        ],
        (("sliding", (2, 4, 90, 90)), "strided"),
    ),
)
@BOTH
def test_array_bias(schedule, name, shape):
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(90)
    bias = jnp.asarray(np.random.default_rng(3).standard_normal(shape), jnp.float32)
    *got, got_bias = run(*arrays, pattern=pattern, is_causal=True, bias=bias, by=("bias",))
    expected = expect(arrays, oracles.pairs(90, 90, sees, is_causal=True), bias=bias)
    assert_close(got, expected)
    full = bias.reshape((1,) * (4 - bias.ndim) + shape)
    summed = expected[4].sum(tuple(a for a in range(4) if full.shape[a] == 1), keepdims=True).reshape(shape)
    # A bias constant along a row changes nothing, so its gradient is 0 up to rounding.
    assert np.linalg.norm(got_bias - summed) < 1e-4 * max(np.linalg.norm(summed), 1.0)


@BOTH
def test_array_bias_with_few_keys_in_reach(schedule):
    """Of 50 keys, the only query reaches one."""
    arrays = random_qkv(1, 50)
    bias = jnp.asarray(np.random.default_rng(3).standard_normal((1, 4, 1, 50)), jnp.float32)
    *got, got_bias = run(*arrays, local_window_size=(30, 0), bias=bias, by=("bias",))
    assert_close(got, expect(arrays, oracles.pairs(1, 50, oracles.sliding(30, 0)), bias=bias))
    assert np.abs(got_bias).max() < 1e-6  # the weight of a single key is 1


@pytest.mark.parametrize("name", ["sliding", "big_bird"])
@BOTH
def test_lengths_and_poisoned_padding(schedule, name):
    """NaN in padded keys, values and queries changes neither results nor gradients."""
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(130, batch=3)
    poisoned, lengths, inside = with_padding(arrays, [130, 60, 1], [77, 130, 0])
    got = run(*poisoned, pattern=pattern, **lengths)
    assert_close(got, expect(arrays, oracles.pairs(130, 130, sees) & inside))


@pytest.mark.parametrize("name", slow_unless(["dilated", "fixed", "block_mask"], ("dilated", "fixed")))
@BOTH
def test_segments(schedule, name):
    """Only equal ids see each other. A pair of id arrays covers T != S. Some rows see nothing."""
    pattern, sees = PATTERNS[name]
    rng = np.random.default_rng(7)
    arrays = random_qkv(60, 130)
    ids = rng.integers(0, 3, (2, 60)), rng.integers(0, 2, (2, 130))
    got = run(*arrays, pattern=pattern, segment_ids=tuple(jnp.asarray(x) for x in ids))
    visible = oracles.pairs(60, 130, sees)[None] & (ids[0][:, :, None] == ids[1][:, None, :])
    assert not visible.any(-1).all()
    assert_close(got, expect(arrays, visible[:, None]))


@pytest.mark.parametrize(
    "name",
    slow_unless(
        [n for n in PATTERNS if PATTERNS[n][0].causal_ok],
        ("sliding", "dilated", "bucketed", "strided", "fixed", "block_mask"),
    ),
)
def test_causal_bitwise(name):
    """See jax#39576."""
    pattern, sees = PATTERNS[name]
    attend = functools.partial(xla_attention, pattern=pattern, is_causal=True)
    sees_any = lambda t: any(sees(t, j) for j in range(t + 1))  # noqa: E731
    check_causal(attend, random_qkv(130, batch=1), (1, 64, 100, 129), sees_any)


# --- Cost: no array of size n x n, and memory proportional to n ---

LINEAR = {
    "sliding": SlidingWindow(255, 0),
    "dilated": Dilated(63, 64, 2),
    "block_diagonal": BlockDiagonal(128),
    "bucketed": Bucketed(64),
    "global_window": GlobalWindow(64, 64, 16),
    "neighbourhood": Neighbourhood(32, 2, 2),
    "global_segments": GlobalWindow(64, 64, 16, 32),
    "big_bird": BigBird(64, 3, 1, 2),
}


def compiled(pattern, length, **kwargs):
    """Forward and backward, compiled for abstract inputs."""
    shape = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
    attend = functools.partial(xla_attention, pattern=pattern, **kwargs)

    def both(query, key, value, d_out):
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(d_out)

    return jax.jit(both).lower(*[shape] * 4).compile()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, "loop") for name in LINEAR] + [(name, "at_once") for name in ("sliding", "dilated", "big_bird")],
    indirect=["schedule"],
)
def test_memory_grows_linearly(name, schedule):
    small, large = (compiled(LINEAR[name], n) for n in (2**14, 2**15))
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (small, large)]
    assert sizes[1] <= 2.2 * sizes[0], sizes
    assert largest_array(small.as_text()) < (2**14) ** 2 // 8


def test_largest_array_sees_one_of_all_pairs():
    """Negative control for the test above."""

    def attend(query, key, value):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, value)

    shape = jax.ShapeDtypeStruct((1, 4096, 1, 16), jnp.float32)
    assert largest_array(jax.jit(attend).lower(*[shape] * 3).compile().as_text()) >= 4096**2


@pytest.mark.parametrize(("platform", "loops"), [("cpu", True), ("tpu", False), ("cuda", False)])
def test_schedule_is_chosen_when_lowering(platform, loops):
    """Lowering on this CPU for another platform uses that platform's schedule."""
    shape = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)
    attend = jax.jit(functools.partial(xla_attention, local_window_size=(64, 0)))
    text = attend.trace(*[shape] * 3).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == loops


@pytest.mark.parametrize(
    "name", slow_unless(["strided", "fixed", "global_window", "big_bird"], ("strided", "big_bird"))
)
@BOTH
def test_parts_merge_exactly_at_large_scores(schedule, name):
    """Patterns with several parts are as exact as one softmax at scores of 10,000, where a log-sum-exp rounds to
    1e-3."""
    pattern, sees = PATTERNS[name]
    rng = np.random.default_rng(0)
    # Products of small integers are exact in float32, so only the softmax rounds.
    query, key = (rng.integers(0, 2, (1, 130, 1, 8)).astype(np.float32) for _ in range(2))
    query[..., 0], key[..., 0] = 100.0, 100.0
    value = rng.standard_normal((1, 130, 1, 8)).astype(np.float32)
    out = xla_attention(query, key, value, pattern=pattern, scale=1.0)
    expected, _ = oracles.softmax_attention(query, key, value, oracles.pairs(130, 130, sees), scale=1.0)
    assert oracles.relative_error(out, expected) < 1e-6
