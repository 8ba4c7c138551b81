"""Local attention and compression on sequences shared by four devices: the same numbers as one device, and what
travels.

Each case runs whole on one device and in shards on four, and compares results and gradients of a random weighting."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import brl_jax
from brl_jax import ALiBi, BlockDiagonal, Dilated, SlidingWindow, alibi_slopes
from brl_jax.attention.compressed import sharded as compressed_sharded
from brl_jax.attention.local import sharded
from tests.marks import slow_unless
from tests.support.collectives import collectives
from tests.support.meshes import check_equal, with_gradients

pytestmark = pytest.mark.xdist_group("devices")
BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 28, 4, 2, 8
CUT, WHOLE = P(None, "sequence"), P()


@functools.cache
def mesh():
    return jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def both(whole, sharded_call, arrays, specs, others=(), other_specs=(), check_vma=True):
    """Results and gradients of a function on whole sequences, and of its sharded form."""
    options = {
        "mesh": mesh(),
        "in_specs": (*specs, *other_specs),
        "out_specs": specs[0],
        "check_vma": check_vma,
    }
    return [
        [np.asarray(x) for x in jax.tree.leaves(with_gradients(lambda *x, f=f: f(*x, *others))(*arrays))]
        for f in (whole, jax.shard_map(sharded_call, **options))
    ]


def qkv():
    query = normal(0, BATCH, LENGTH, HEADS, SIZE)
    return query, normal(1, BATCH, LENGTH, KV_HEADS, SIZE), normal(2, BATCH, LENGTH, KV_HEADS, SIZE)


def local(pattern, is_causal, lengths=None, segments=None, sinks=None):
    query, key, value = qkv()
    options = {"pattern": pattern, "is_causal": is_causal, "logits_soft_cap": sinks and 0.8}
    if lengths is not None:
        lengths = np.asarray(lengths, np.int32)
        for row, stop in enumerate(lengths):
            key[row, stop:] = value[row, stop:] = np.nan

    def whole(query, key, value, sinks, segments, lengths):
        return brl_jax.local_attention(
            query, key, value, segment_ids=segments, key_value_seq_lengths=lengths, sinks=sinks, **options
        )

    def sharded_call(query, key, value, sinks, segments, lengths):
        return sharded.local_attention(
            query,
            key,
            value,
            axis_name="sequence",
            segment_ids=segments,
            key_value_seq_lengths=lengths,
            sinks=sinks,
            **options,
        )

    others, other_specs = (segments, lengths), (WHOLE if segments is None else CUT, WHOLE)
    if sinks is None:
        others, other_specs = (None, *others), (WHOLE, *other_specs)
        return both(whole, sharded_call, (query, key, value), (CUT,) * 3, others, other_specs)
    arrays = (query, key, value, np.asarray(sinks, np.float32))
    return both(whole, sharded_call, arrays, (*[CUT] * 3, WHOLE), others, other_specs)


ENDS = np.iinfo(np.int32)


def packed(first=(3, 1, 7), second=(0, 5)):
    """Ids of packed sequences that end inside a device's tokens; one spans several devices."""
    return np.stack([np.repeat(first, [4, 15, 9]), np.repeat(second, [26, 2])]).astype(np.int32)


def compressed(
    score="softmax",
    contrast=True,
    lengths=None,
    bias=False,
    implementation=None,
    length=LENGTH,
    check_vma=True,
):
    query = normal(0, BATCH, 3, HEADS, SIZE)
    key, value, contrast_key = (normal(seed, BATCH, length, HEADS, SIZE) for seed in (1, 2, 3))
    if lengths is not None:
        lengths = np.asarray(lengths, np.int32)
        for row, stop in enumerate(lengths):
            key[row, stop:] = value[row, stop:] = contrast_key[row, stop:] = np.nan
    arrays, specs = [query, key, value], [WHOLE, CUT, CUT]
    if contrast:
        arrays, specs = [*arrays, contrast_key, normal(4, HEADS)], [*specs, CUT, WHOLE]

    def function(query, key, value, *rest, axis_name=None):
        contrast_key, gamma, lengths = rest if contrast else (None, None, *rest)
        return brl_jax.compress(
            query,
            key,
            contrast_key,
            value,
            gamma=gamma,
            scale=0.7,
            score=score,
            bias=ALiBi(alibi_slopes(HEADS)) if bias else None,
            key_value_seq_lengths=lengths,
            axis_name=axis_name,
            implementation=implementation,
        )

    sharded_call = functools.partial(function, axis_name="sequence")
    return both(function, sharded_call, arrays, specs, (lengths,), (WHOLE,), check_vma)


def blocks(history, block, earlier):
    """Four devices with two blocks each; `earlier` tokens precede the sequence."""
    count = 8
    query = normal(0, BATCH, count, 3, HEADS, SIZE)
    arrays = [query, *(normal(seed, BATCH, count * block, HEADS, SIZE) for seed in (1, 2, 3))]
    first = [normal(seed, BATCH, history, HEADS, SIZE) for seed in (4, 5, 6)]
    start = np.arange(count, dtype=np.int32) * block
    exist = np.minimum(start + (earlier or 0), history).astype(np.int32)
    gamma = normal(7, HEADS)
    options = {"block_size": block, "history_size": history, "scale": 0.7}

    def whole(query, key, contrast_key, value, *rest):
        *first, gamma, exist = rest
        before = first or [jnp.zeros((BATCH, history, HEADS, SIZE))] * 3
        joined = [jnp.concatenate(pair, axis=1) for pair in zip(before, (key, contrast_key, value))]
        return brl_jax.compress_blocks(query, *joined, gamma=gamma, history_lengths=exist, **options)

    def sharded_call(query, key, contrast_key, value, *rest):
        *first, gamma, exist = rest
        return compressed_sharded.compress_blocks(
            query, key, contrast_key, value, gamma=gamma, axis_name="sequence", history_lengths=exist,
            **dict(zip(("earlier_key", "earlier_contrast_key", "earlier_value"), first)), **options,
        )  # fmt: skip

    given = first if earlier else []
    arrays, specs = [*arrays, *given, gamma], [*(CUT,) * 4, *(WHOLE,) * (len(given) + 1)]
    return both(whole, sharded_call, arrays, specs, (exist,), (P("sequence"),))


CASES = {
    "window": lambda: local(SlidingWindow(4, 0), True),
    "window over several shards, packed": lambda: local(SlidingWindow(16, 0), True, segments=packed()),
    "both sides, padded": lambda: local(SlidingWindow(3, 9), False, lengths=[28, 17]),
    "ids at the ends of int32, padded": lambda: local(
        SlidingWindow(9, 3),
        False,
        lengths=[28, 17],
        segments=packed([-1, ENDS.min, ENDS.max], [ENDS.min + 1, -2]),
    ),
    "negative ids over several shards": lambda: local(
        SlidingWindow(16, 0), True, segments=packed([-1, -2, -1], [-2, -1])
    ),
    "window over everything": lambda: local(SlidingWindow(100, 100), False, segments=packed()),
    "sinks and a soft cap": lambda: local(
        SlidingWindow(16, 0), True, segments=packed(), sinks=[0.5, -1.0, 2.0, 0.0]
    ),
    "dilated": lambda: local(Dilated(2, 0, 3), True, segments=packed()),
    "blocks that no shard holds": lambda: local(BlockDiagonal(5), True),
    "compress": compressed,
    "compress, padded": lambda: compressed(lengths=[28, 5], bias=True),
    "compress, relu2": lambda: compressed("relu2", lengths=[23, 1]),
    "compress, laplace, once": lambda: compressed("laplace", contrast=False),
    "compress without the types of what varies": lambda: compressed(lengths=[28, 5], check_vma=False),
    # JAX interprets TPU kernels in shard_map only without these types.
    "compress, kernel": lambda: compressed(
        lengths=[512, 140], implementation="pallas_interpret", length=512, check_vma=False
    ),
    "history of one block": lambda: blocks(4, 4, None),
    "history over several shards": lambda: blocks(21, 4, 21),
    "history begun": lambda: blocks(5, 4, 2),
}


def gradients(dtype=jnp.float32, **options):
    """The gradients of local attention with 1024 tokens on each of four devices, traced and ready to be lowered."""
    cut = jax.sharding.NamedSharding(mesh(), CUT)
    shapes = [jax.ShapeDtypeStruct((1, 4096, heads, SIZE), dtype, sharding=cut) for heads in (HEADS, 2, 2)]
    attend = functools.partial(sharded.local_attention, axis_name="sequence", **options)
    mapped = jax.shard_map(attend, mesh=mesh(), in_specs=(CUT,) * 3, out_specs=CUT)
    return jax.jit(jax.grad(lambda *x: mapped(*x).sum(), (0, 1, 2))).trace(*shapes)


def travelled():
    """(kind, elements) of each collective in the program of a window's gradients."""
    return collectives(gradients(pattern=SlidingWindow(15, 0)).lower().compile())


def kernels():
    """The kernels in a TPU program of a window's gradients, for windows reaching one device or several."""
    lowered = [
        gradients(jnp.bfloat16, pattern=SlidingWindow(left, 0), is_causal=True)
        .lower(lowering_platforms=("tpu",))
        .as_text()
        for left in (127, 2000)
    ]
    return [sorted(set(re.findall(r'kernel_name = "(\w+)"', text))) for text in lowered]


PARTS = {**CASES, "travelled": travelled, "kernels": kernels}


# Fast: neighbours that send what windows reach, blocks and histories over several devices, and sums over all devices.
FAST = (
    "window over several shards, packed",
    "both sides, padded",
    "blocks that no shard holds",
    "compress, padded",
    "history over several shards",
)


@pytest.mark.parametrize("name", slow_unless(CASES, FAST))
def test_results_and_gradients_equal_one_devices(result, name):
    check_equal(*result(name))


def test_only_the_window_travels(result):
    """Of the 1024 keys and values (16 numbers each) on a device, only the 15 that a window reaches are sent."""
    kinds = {kind for kind, _ in result("travelled")}
    assert kinds == {"collective-permute"}
    assert max(size for _, size in result("travelled")) <= 2 * 15 * 16


def test_on_a_tpu_a_short_halo_takes_the_kernel_for_windows(result):
    near, far = result("kernels")
    assert near == ["window_attention_backward", "window_attention_forward"]
    assert "block_attention_forward" in far
