"""mlr_attention against a float64 oracle, in the CPU's loop and with all rectangles at once; its laws and its cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.structured import mlr_tiles
from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.attention.structured.mlr_levels import doubling_block_sizes
from brl_jax.attention.structured.mlr_rectangles import rectangles
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.oracles.structured import mlr_attention as oracle
from tests.support.attention import (
    assert_close,
    largest_array,
    outputs_and_gradients,
    random_qkv,
)

# name: (ranks, block sizes) with heads of 8
LEVELS = {
    "one": ((8,), (None,)),
    "growing": ((4, 2, 2), None),
    "small_blocks": ((2, 2, 1, 3), (None, 24, 12, 4)),
    "thirds": ((4, 3, 1), (None, 297, 99)),
    "equal": ((4, 2, 2), (None, 32, 32)),
    "no_common_block": ((5, 2, 1), (160, 80, 16)),
    "odd": ((2, 6), (None, 35)),
}


def levels_of(name, length):
    ranks, sizes = LEVELS[name]
    return ranks, doubling_block_sizes(length, len(ranks)) if sizes is None else sizes


def run(arrays, **options):
    return outputs_and_gradients(mlr_attention, *arrays, **options)


def causal_pairs(length):
    return np.tri(length, dtype=bool)


# Fast: levels of many blocks that divide each other, and blocks without a common divisor; all rectangles at once; and
# without causality, where no tile is cut.
CASES = slow_unless(
    [
        *((name, "loop", is_causal) for name in LEVELS for is_causal in (True, False)),
        *((name, "at_once", is_causal) for name in ("thirds", "small_blocks") for is_causal in (True, False)),
    ],
    (
        ("small_blocks", "loop", True),
        ("odd", "loop", True),
        ("small_blocks", "at_once", True),
        ("thirds", "loop", False),
    ),
)


@pytest.mark.parametrize(("name", "schedule", "is_causal"), CASES, indirect=["schedule"])
def test_equals_oracle(schedule, name, is_causal):
    """Forward and gradients at a length that no block divides."""
    length = 301
    arrays = random_qkv(length)
    ranks, sizes = levels_of(name, length)
    visible = causal_pairs(length) if is_causal else np.ones((1, 1), bool)
    got = run(arrays, ranks=ranks, block_sizes=LEVELS[name][1], is_causal=is_causal)
    assert_close(got, oracle(arrays, ranks, sizes, visible))
    one = oracle(arrays, (8,), (None,), visible)
    assert name == "one" or oracles.relative_error(got[0], one[0]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
def test_blocks_that_follow_the_input(is_causal):
    """Blocks may have any lengths, differ between sequences, and be scattered. Ids of aligned blocks give what
    block_sizes gives."""
    length, ranks = 301, (4, 3, 1)
    arrays = random_qkv(length)
    rng = np.random.default_rng(3)
    ids = np.stack([np.sort(rng.integers(5, size=(2, length))), rng.integers(9, size=(2, length))], -1)
    visible = causal_pairs(length) if is_causal else np.ones((1, 1), bool)
    got = run(arrays, ranks=ranks, block_ids=jnp.asarray(ids), is_causal=is_causal)
    assert_close(got, oracle(arrays, ranks, (None, ids[..., 0], ids[..., 1]), visible))
    other = run(arrays, ranks=ranks, block_ids=jnp.asarray(ids[::-1]), is_causal=is_causal)
    assert oracles.relative_error(other[0], got[0]) > 1e-2
    aligned = jnp.asarray(np.tile(np.arange(length)[:, None] // [64, 16], (2, 1, 1)))
    options = {"ranks": ranks, "is_causal": is_causal, "key_value_seq_lengths": jnp.array([length, 90])}
    expected = mlr_attention(*arrays[:3], block_sizes=(None, 64, 16), **options)
    np.testing.assert_allclose(mlr_attention(*arrays[:3], block_ids=aligned, **options), expected, atol=1e-5)


@pytest.mark.slow
def test_many_tiles_and_steps(monkeypatch):
    """With such a small cache, every rectangle is cut into tiles that are processed one after the other."""
    monkeypatch.setattr(mlr_tiles, "CACHE_BYTES", 2**12)
    arrays = random_qkv(301)
    ranks, sizes = levels_of("small_blocks", 301)
    assert_close(
        run(arrays, ranks=ranks, block_sizes=sizes), oracle(arrays, ranks, sizes, np.ones((1, 1), bool))
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_every_pair_is_in_one_rectangle(is_causal):
    for length in (1, 50, 129, 301, 640):
        for ranks, sizes in (((8,), (None,)), ((4, 2, 2), (None, 96, 16)), ((4, 2, 2), (270, 90, 45))):
            seen = np.zeros((length, length), int)
            for r in rectangles(length, ranks, sizes, is_causal):
                for block in range(r.blocks):
                    first = block * r.period
                    rows, columns = (slice(first + a, first + b) for a, b in (r.query, r.key))
                    seen[rows, columns] += 1
            expected = np.tri(length, dtype=int) if is_causal else np.ones((length, length), int)
            needed = expected.astype(bool)
            assert (seen[needed] == 1).all()
            assert seen.max() == 1


# --- Cost ---


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["loop", "at_once"], indirect=True)
def test_memory_grows_linearly(schedule):
    """Temporary memory, forward and backward, is proportional to n, and no array has n x n entries."""

    def compiled(length):
        shape = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)

        def both(query, key, value, d_out):
            attend = functools.partial(
                mlr_attention, ranks=(12, 4), block_sizes=(None, 2**12), is_causal=True
            )
            out, pull = jax.vjp(attend, query, key, value)
            return out, *pull(d_out)

        return jax.jit(both).lower(*[shape] * 4).compile()

    small, large = compiled(2**14), compiled(2**15)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (small, large)]
    assert sizes[1] <= 2.2 * sizes[0], sizes
    assert largest_array(small.as_text()) < (2**14) ** 2 // 8


@pytest.mark.parametrize("schedule", ["at_once"], indirect=True)
def test_flops_of_the_scores(schedule, monkeypatch):
    """The compiler counts sum_l r_l / 2^(l-1) of full scores' FLOPs (arXiv:2509.07963, section 3.4): 39.4 / 64."""
    monkeypatch.setattr(mlr_tiles, "_ROWS", 2**20)  # no loops: the compiler counts their bodies once
    length, ranks = 2048, (32, 8, 8, 8, 4, 4)
    shape = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
    values = jax.ShapeDtypeStruct((1, length, 1, 1), jnp.float32)

    def flops(function):
        return jax.jit(function).lower(shape, shape, values).compile().cost_analysis()["flops"]

    levels = flops(functools.partial(mlr_attention, ranks=ranks))
    sizes = doubling_block_sizes(length, len(ranks))
    one = flops(functools.partial(mlr_attention, ranks=(32, 32), block_sizes=(None, None)))
    ratio = sum(rank / 2**level for level, rank in enumerate(ranks)) / 64
    assert sizes == (None, 1024, 512, 256, 128, 64)
    assert one - levels == pytest.approx((1 - ratio) * 2 * 64 * length**2, rel=0.02)
    assert levels < (ratio + 0.1) * flops(full_attention)
    causal = flops(functools.partial(mlr_attention, ranks=ranks, is_causal=True))
    assert causal < 0.55 * levels


def test_doubling_block_sizes():
    assert doubling_block_sizes(1024, 4) == (None, 512, 256, 128)
    assert doubling_block_sizes(29, 3) == (None, 16, 8)
    assert doubling_block_sizes(2, 4) == (None, 4, 2, 1)
