"""The block-sparse kernels on runs of keys that each query chooses, against a float64 oracle."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import block_attention
from tests.oracles import kernels as oracle
from tests.pallas_kernels.tpu.inputs import arrays
from tests.support.attention import pulled


def random_starts(rng, batch, queries, key_heads, keys, runs, size, offset, aligned):
    """Disjoint runs up to the query's position; some queries have fewer than `runs`. The query at 3 chooses nothing,
    and nobody chooses keys 128 to 255."""
    starts = np.full((batch, queries, key_heads, runs), keys, np.int32)
    for place in np.ndindex(batch, queries, key_heads):
        shift = 0 if aligned else int(rng.integers(size))
        possible = np.arange(shift, place[1] + offset + 1, size)
        possible = possible[(possible + size <= 128) | (possible >= 256)]
        count = 0 if place[1] == 3 else min(len(possible), int(rng.integers(runs + 1)))
        starts[place][:count] = rng.permutation(possible)[:count]
    return starts


def check(heads, lengths, runs, size, *, aligned, dtype=jnp.float32, tolerance=1e-5, offset=0, known=True):
    (count, groups, head_dim), (queries, keys), batch = heads, lengths, 2
    q, k, v, g = arrays(
        0,
        dtype,
        (batch, queries, count, head_dim),
        (batch, keys, groups, head_dim),
        (batch, keys, groups, head_dim),
        (batch, queries, count, head_dim),
        spread=1.0,
    )
    starts = random_starts(
        np.random.default_rng(1), batch, queries, groups, keys, runs, size, offset, aligned
    )
    places = np.arange(keys)
    seen = ((places - starts[..., None] >= 0) & (places - starts[..., None] < size)).any(3)
    seen &= (places <= np.arange(queries)[:, None] + offset)[None, :, None]
    blocks = [range(-(-keys // 128))] * -(-queries // 128)

    chosen = {"chosen_starts": jnp.asarray(starts), "chosen_size": size, "chosen_aligned": aligned}
    place = {"query_position": offset} if known else {"query_position": 0, "shift": jnp.int32(offset)}
    options = {"key_blocks": blocks, "block_q": 128, "block_k": 128, "causal": True, "interpret": True}
    got = pulled(functools.partial(block_attention, **options, **chosen, **place), g, q, k, v)
    group = count // groups
    parts = []
    for head in range(groups):
        its = slice(head * group, (head + 1) * group), slice(head, head + 1)
        arguments = q[:, :, its[0]], k[:, :, its[1]], v[:, :, its[1]], seen[:, :, head], head_dim**-0.5
        out, _, *grads = oracle.attention(*arguments, g[:, :, its[0]])
        parts.append((out, *grads))
    want = [np.concatenate(x, axis=2) for x in zip(*parts)]
    oracle.check(got, want, tolerance)


@pytest.mark.slow
def test_whole_runs_of_grouped_heads_at_a_ragged_length():
    check((4, 2, 64), (300, 300), 5, 16, aligned=True)


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("heads", "size", "dtype", "tolerance"),
    [
        ((4, 2, 32), 64, jnp.float32, 1e-5),
        ((2, 1, 128), 8, jnp.bfloat16, 1e-2),
        ((3, 3, 40), 24, jnp.float32, 1e-5),
    ],
)
def test_runs_of_any_size_and_heads_of_any_layout(heads, size, dtype, tolerance, aligned):
    check(heads, (200, 330), 4, size, aligned=aligned, dtype=dtype, tolerance=tolerance, offset=130)


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False])
def test_queries_whose_offset_is_known_at_run_time_alone(aligned):
    check((2, 1, 64), (140, 300), 3, 16, aligned=aligned, offset=150, known=False)
