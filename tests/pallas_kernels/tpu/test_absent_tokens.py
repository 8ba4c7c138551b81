"""Segment ids of any value together with lengths: no query sees an absent key, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import WindowBlocks, block_attention, window_attention
from tests.pallas_kernels.tpu import oracle
from tests.pallas_kernels.tpu.inputs import arrays

LENGTH, HEADS, HEAD_DIM = 140, 1, 64
LEFT, RIGHT = 60, 20
ENDS = np.iinfo(np.int32)


@functools.cache
def compiled(kernel):
    """Output and gradients of a kernel, compiled once for all ids and lengths."""
    if kernel == "window":
        sizes = WindowBlocks(tile=128, block=128, backward_tile=128, backward_block=128)
        attend = functools.partial(window_attention, left=LEFT, right=RIGHT, blocks=sizes, chip="v5e")
    else:
        attend = functools.partial(
            block_attention,
            key_blocks=[[0, 1], [0, 1]],
            block_q=128,
            block_k=128,
            mask=lambda queries, keys: (keys >= queries - LEFT) & (keys <= queries + RIGHT),
        )

    @jax.jit
    def run(q, k, v, g, ids, query_lengths, key_lengths):
        tokens = {"query_segment_ids": ids, "key_segment_ids": ids}
        tokens |= {"query_lengths": query_lengths, "key_lengths": key_lengths}
        out, pull = jax.vjp(functools.partial(attend, interpret=True, **tokens), q, k, v)
        return out, *pull(g)

    return run


@pytest.mark.parametrize("lengths", [(140, 90), pytest.param((75, 140), marks=pytest.mark.slow), (75, 90)])
@pytest.mark.parametrize(
    "ids",
    [
        *(
            (pytest.param(ids, marks=pytest.mark.slow))
            for ids in ((-1,), (-1, -2), (0, 1, 2), (ENDS.min, ENDS.max))
        ),
        (-2,),
        (ENDS.min, ENDS.min + 1, -1, ENDS.max),
    ],
)
@pytest.mark.parametrize("kernel", ["window", "blocks"])
def test_callers_ids_never_match_absent_tokens(kernel, ids, lengths):
    """The first row holds each id in turn, the second the ids in reverse order; absent tokens hold NaN."""
    q, k, v, g = arrays(11, jnp.float32, *[(2, LENGTH, HEADS, HEAD_DIM)] * 4)
    turns = np.arange(LENGTH) * len(ids) // LENGTH
    segments = np.asarray([np.asarray(ids)[turns], np.asarray(ids)[::-1][turns]], np.int32)
    at = np.arange(LENGTH)
    stops = [np.asarray([length, length - 30], np.int32) for length in lengths]
    query_exists, key_exists = (at[None] < stop[:, None] for stop in stops)
    offset = at[None, :] - at[:, None]
    seen = ((offset >= -LEFT) & (offset <= RIGHT))[None] & (segments[:, :, None] == segments[:, None, :])
    seen &= query_exists[:, :, None] & key_exists[:, None, :]
    want = oracle.attention(q, k, v, seen, HEAD_DIM**-0.5, g)

    q = jnp.where(query_exists[:, :, None, None], q, jnp.nan)
    k, v = (jnp.where(key_exists[:, :, None, None], x, jnp.nan) for x in (k, v))
    got = compiled(kernel)(q, k, v, g, *(jnp.asarray(x) for x in (segments, *stops)))
    distances = [oracle.distance(x, y) for x, y in zip(got, (want[0], *want[2:]), strict=True)]
    assert max(distances) < 1e-5, distances
