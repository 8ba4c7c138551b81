"""The block-sparse kernels with and without biases by distance, interpreted on a CPU, against dense float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import Granules, block_attention
from pallas_kernels.tpu.block import plan
from tests.oracles import kernels as oracle
from tests.pallas_kernels.tpu.inputs import SLOPES, arrays, bias_by_distance, table
from tests.support.attention import pulled


def causal(queries, keys):
    return keys <= queries


def dilated(queries, keys):
    """Every third of the 150 keys on both sides."""
    return (abs(queries - keys) <= 150) & (abs(queries - keys) % 3 == 0)


def check(
    rows,
    lengths,
    heads,
    kind=None,
    *,
    numbers=None,
    first=0,
    dtype=jnp.float32,
    mask=None,
    masked=True,
    blocks=(128, 128),
    offset=(0, 0),
    shift=None,
    causal=False,
    segments=None,
    **options,
):
    """Compares outputs, log-sum-exps and gradients with the reference under `mask`. The kernel gets the same mask,
    unless `options` express it differently."""
    (queries, keys), (count, groups, head_dim) = lengths, heads
    shapes = [(1, n, h, head_dim) for n, h in ((queries, count), *[(keys, groups)] * 2, (queries, count))]
    q, k, v, g = arrays(0, dtype, *shapes, spread=1.0 if kind is None else 0.5)
    (g_log_sum,) = arrays(1, jnp.float32, (1, queries, count))
    numbers = np.resize(SLOPES, count) if numbers is None else numbers
    place_q = np.arange(queries)[:, None] + offset[0] + (0 if shift is None else shift)
    place_k = np.arange(keys)[None] + offset[1]
    seen = np.zeros((queries, keys), bool)
    for number, row in enumerate(rows):
        for other in row:
            seen[number * blocks[0] :, other * blocks[1] : (other + 1) * blocks[1]][: blocks[0]] = True
    if mask is not None:
        seen &= np.asarray(mask(place_q, place_k))
    if causal:
        seen &= place_k <= place_q
    if segments is not None:
        seen &= segments[0][0][:, None] == segments[1][0][None]
        names = ("query_segment_ids", "key_segment_ids")
        options |= dict(zip(names, map(jnp.asarray, segments)))
    bias = pull_bias = None
    if kind is not None:
        bias, pull_bias = oracle.by_distance(kind, numbers, first, place_q - place_k)
    # The log-sum-exp of a row that sees nothing has no gradient.
    g_log_sum = jnp.where(jnp.asarray(seen.any(-1))[None, :, None], g_log_sum, 0.0)

    @jax.jit
    def run(q, k, v, numbers, shift):
        def f(q, k, v, numbers):
            return block_attention(
                q, k, v, bias=bias_by_distance(kind, numbers, first), key_blocks=rows, block_q=blocks[0],
                block_k=blocks[1], mask=mask if masked else None, query_position=offset[0], key_position=offset[1],
                shift=shift, causal=causal, return_log_sum_exp=True, **{"interpret": True} | options,
            )  # fmt: skip

        (out, log_sum), pull = jax.vjp(f, q, k, v, numbers)
        return log_sum, out, *pull((g, g_log_sum))

    log_sum, *got = run(q, k, v, jnp.asarray(numbers), None if shift is None else jnp.int32(shift))
    out, want_log_sum, *grads = oracle.attention(
        q, k, v, seen[None], head_dim**-0.5, g, g_log_sum, bias=None if kind is None else bias[None]
    )
    if kind is None:
        got = got[:4]
    else:
        grads[3] = pull_bias(grads[3])
    oracle.check(got, (out, *grads), 1e-5 if dtype == jnp.float32 else 1e-2)
    close = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.asarray(log_sum), want_log_sum, rtol=close, atol=close)


CAUSAL = [[0], [1, 0], [2, 0, 1]]
EVERY = [[0, 1, 2]] * 3
DILATED = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]
MASKED = {
    # Lists in any order, a block of queries without keys, and keys that nobody reads.
    "holes, grouped, ragged": ([[0], [2, 0], [], [3, 1]], (400, 500), (2, 1, 128), {"mask": causal}),
    "two heads in a tile": ([[0], [1, 0], [2]], (300, 700), (2, 2, 64), {"blocks": (128, 256)}),
    # One backward kernel for all gradients, because every block of queries and of keys is listed.
    "grouped, ragged, every block": (CAUSAL, (300, 310), (4, 2, 128), {"mask": causal}),
    "dilated": (DILATED, (512, 512), (1, 1, 128), {"dtype": jnp.bfloat16, "mask": dilated}),
}


@pytest.mark.parametrize("name", MASKED)
def test_lists_of_blocks(name):
    rows, lengths, heads, options = MASKED[name]
    check(rows, lengths, heads, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "keys", "kind"), [([[0], [], [1]], 200, None), ([[1, 0], [0], [2, 0]], 300, "slopes")]
)
def test_poisoned_memory_and_any_order(rows, keys, kind, hostile):
    check(rows, (300, keys), (2, 1, 128), kind, mask=causal, interpret=hostile)


@pytest.mark.slow
def test_poisoned_memory_with_bits(hostile):
    """Granules of 100 positions, up to 3 per block, where only the second sees and is seen; a narrow head shares a
    tile."""
    bits = Granules(100, ((1 << 3 * 1 + 1,), (1 << 3 * 0 + 1,)))
    sees = lambda queries, keys: (queries >= 100) & (queries < 200) & (keys >= 100)  # noqa: E731
    check([[0], [0]], (256, 128), (2, 1, 64), mask=sees, masked=False, granules=bits, interpret=hostile)


@pytest.mark.slow
def test_lists_in_pieces(monkeypatch):
    """Lists too long to fit in scalar memory at once, forward and by keys. A single list that is too long is an
    error."""
    rows = [[0], [0, 1], [], [1, 2, 3], [4]]
    monkeypatch.setattr(plan, "MAX_PAIRS", 3)
    check(rows, (600, 600), (2, 1, 64), mask=causal)
    monkeypatch.setattr(plan, "MAX_PAIRS", 2)
    with pytest.raises(ValueError, match="a block of queries pairs with 3 others, but scalar memory holds 2"):
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
    oracle.check(pulled(f, g, q, k, v), (want[0], *want[2:])[:4], 1e-5)


BIASED = {
    # Grouped heads that share a tile, ragged lengths, positions that begin anywhere.
    "slopes, causal": (CAUSAL, (300, 310), (4, 2, 64), "slopes", {"causal": True, "offset": (13, 5)}),
    "slopes": ([[0, 1]] * 3, (300, 400), (2, 1, 128), "slopes", {"blocks": (128, 256)}),
    "a table shorter than a block": (EVERY, (300, 380), (2, 2, 64), "table", {"numbers": table(2, 41), "first": -20}),
    # In distant pairs of blocks, all distances have the same bias.
    "a longer table": (EVERY, (300, 380), (2, 2, 64), "table", {"numbers": table(2, 601), "first": -300}),
    # Three heads, the last of which fills half a tile.
    "a position known at run time": (
        EVERY[:2], (200, 380), (3, 1, 64), "table",
        {"numbers": table(3, 140), "causal": True, "offset": (100, 3), "shift": 77},
    ),
    "a table that hides distances": (
        [[0, 1]] * 2, (200, 200), (1, 1, 64), "table",
        {"numbers": np.where(np.arange(41) % 2, table(1, 41), -np.inf).astype(np.float32), "first": -20},
    ),
    "blocks larger than the table's tiles": (
        [[0, 1]] * 2, (500, 600), (2, 1, 64), "table",
        {"numbers": table(2, 100), "first": -50, "blocks": (256, 384)},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_bias_by_distance(name):
    rows, lengths, heads, kind, options = BIASED[name]
    check(rows, lengths, heads, kind, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_bfloat16_in_segments(kind):
    ids = np.arange(384, dtype=np.int32)[None] // 150
    options = {"numbers": table(1, 301) if kind == "table" else None, "first": -150, "dtype": jnp.bfloat16}
    check(EVERY, (300, 380), (1, 1, 128), kind, segments=(ids[:, :300], ids[:, :380]), **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_gradients_of_several_launches_add_up(kind, monkeypatch, hostile):
    """With poisoned memory, a block of queries without keys, and a step without work."""
    monkeypatch.setattr(plan, "MAX_PAIRS", 3)
    numbers = table(2, 200) if kind == "table" else None
    rows = [[0], [], [1, 0], [3, 2]]
    check(rows, (500, 400), (2, 1, 64), kind, numbers=numbers, causal=True, interpret=hostile)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_causal_bitwise(kind):
    bias = bias_by_distance(kind, SLOPES[:1] if kind == "slopes" else table(1, 30))
    q, k, v = arrays(0, jnp.float32, *[(1, 300, 1, 64)] * 3)
    sizes = {"key_blocks": CAUSAL, "block_q": 128, "block_k": 128}
    f = jax.jit(functools.partial(block_attention, causal=True, bias=bias, interpret=True, **sizes))
    before = f(q, k, v)
    for at in (1, 127, 128, 299):
        after = f(*(x.at[:, at:].add(3.0) for x in (q, k, v)))
        assert (after[:, :at] == before[:, :at]).all()
        assert not (after[:, at:] == before[:, at:]).all()
