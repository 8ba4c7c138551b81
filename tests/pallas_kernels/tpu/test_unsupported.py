"""A kernel's reason for refusing a call is known without tracing, and the call itself raises the same message."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tpu


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def window(x, y=None, **options):
    y = x if y is None else y
    return tpu.window_unsupported, tpu.window_attention, (x, y, y), {"left": 63, "right": 0} | options, {}


def block(x, y=None, **options):
    y = x if y is None else y
    options = {"key_blocks": [[0]] * -(-x.shape[1] // 128), "block_q": 128, "block_k": 128} | options
    return tpu.block_unsupported, tpu.block_attention, (x, y, y), options, {}


def compress(x, y, gamma=True, **options):
    traced = {"gamma": jnp.ones(x.shape[2]) if gamma is True else gamma}
    return tpu.compress_unsupported, tpu.compress, (x, y, y, y), options, traced


def compress_blocks(x, y, **options):
    options = {"block_size": 32, "history_size": 32} | options
    traced = {"gamma": jnp.ones(x.shape[3])}
    return tpu.compress_blocks_unsupported, tpu.compress_blocks, (x, y, y, y), options, traced


def propagate(x, y, heads=2, **options):
    return tpu.propagate_unsupported, tpu.propagate, (x, y, y), options, {"strength": jnp.ones(heads)}


LONG, SHORT, MANY = shaped(1, 300, 2, 64), shaped(1, 16, 2, 64), shaped(1, 3, 16, 2, 64)


@pytest.mark.parametrize(
    "case",
    [
        window(LONG),
        block(LONG),
        compress(SHORT, LONG),
        compress_blocks(MANY, LONG),
        propagate(LONG, SHORT),
        window(shaped(1, 40, 1, 256, dtype=jnp.float32), chip="v5e"),
    ],
)
def test_no_reason_if_the_kernel_supports_the_call(case):
    unsupported, call, arrays, options, traced = case
    assert unsupported(*arrays, **options) is None
    jax.eval_shape(functools.partial(call, **options, **traced), *arrays)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (window(shaped(1, 300, 2, 64, dtype=jnp.float16)), "float32 or bfloat16, got query of float16"),
        (window(shaped(1, 300, 2, 264)), "head_dim up to 256, got 264"),
        (window(shaped(1, 300, 4, 64), shaped(1, 300, 3, 64)), "must be a multiple of those of key"),
        (window(LONG, shaped(1, 301, 2, 64)), "as long as query"),
        (window(shaped(1, 20000, 2, 64), left=9000), "too wide for the window kernel"),
        (window(shaped(1, 4096, 4, 128, dtype=jnp.float32), left=512, right=512), "too wide for the window"),
        (window(LONG, blocks=tpu.WindowBlocks(128, 1 << 14, 128, 1 << 14)), "MiB of VMEM"),
        (block(shaped(1, 300, 2, 64, dtype=jnp.float16)), "float32 or bfloat16"),
        (block(shaped(1, 300, 2, 264)), "head_dim up to 256"),
        (block(LONG, block_k=1 << 16), "MiB of VMEM"),
        (block(LONG, key_blocks=[[0]]), "a list for each of 3 blocks"),
        (compress(shaped(1, 1025, 2, 64), LONG), "at most 1024 compressed tokens, got 1025"),
        (compress(SHORT, LONG, block=1 << 17, splits=1), "MiB of VMEM"),
        (compress(shaped(1, 16, 2, 300), shaped(1, 300, 2, 300)), "head_dim up to 256"),
        (compress(SHORT, shaped(1, 300, 2, 64, dtype=jnp.float32)), "dtype"),
        (compress_blocks(MANY, LONG, block_size=20), "block_size must be a multiple of 16, got 20"),
        (compress_blocks(MANY, LONG, history_size=300), "key must hold"),
        (compress_blocks(shaped(1, 3, 1025, 2, 64), LONG), "at most 1024 compressed tokens"),
        (propagate(LONG, shaped(1, 1025, 2, 64)), "at most 1024 compressed tokens"),
        (propagate(LONG, SHORT, block=1 << 17), "MiB of VMEM"),
        (propagate(LONG, shaped(1, 16, 1, 64)), "must have query's 2 heads"),
    ],
)
def test_names_what_the_call_refuses(case, words):
    unsupported, call, arrays, options, traced = case
    found = unsupported(*arrays, **options)
    assert found is not None
    assert words in found
    with pytest.raises((ValueError, NotImplementedError)) as error:
        jax.eval_shape(functools.partial(call, **options, **traced), *arrays)
    assert str(error.value) == found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (window(LONG, left=-1), "left must be an int of at least 0, got -1"),
        (window(LONG, chip="v99"), "chip must be None or one of"),
        (window(LONG, scale=float("nan")), "scale must be finite"),
        (window(LONG, blocks=tpu.WindowBlocks(128, 128, 128, 128), left=200), "block must hold a window side"),
        (window(LONG, key_segment_ids=jnp.zeros((1, 300), jnp.int32)), "belong together"),
        (window(LONG, key_lengths=jnp.zeros(2, jnp.int32)), r"key_lengths must be ints of shape \(1,\)"),
        (window(LONG, bias=tpu.Slopes(np.ones(3, np.float32))), r"Slopes must have shape \(2,\), got \(3,\)"),
        (window(LONG, bias=tpu.DistanceTable(np.ones(2, np.float32), 0)), r"DistanceTable must have shape \(2, dis"),
        (block(LONG, key_blocks=[[0], [3], [1]]), r"key_blocks\[1\] must name blocks from 0 to 2, each once, got \[3"),
        (block(LONG, key_blocks=[[0, 0], [1], [1]]), r"key_blocks\[0\] must name blocks from 0 to 2, each once"),
        (block(LONG, bias=tpu.Slopes(np.ones(3, np.float32))), r"Slopes must have shape \(2,\), got \(3,\)"),
        (block(LONG, bias=tpu.DistanceTable(np.ones(2, np.float32), 0)), r"DistanceTable must have shape \(2, dis"),
        (block(LONG, bias=tpu.DistanceTable(np.ones((2, 1 << 20), np.float32), 0)), r"needs [0-9.]+ MiB of VMEM"),
        (block(LONG, block_k=100), "block_k must be a positive multiple of 128, got 100"),
        (compress(SHORT, LONG, score="cosine"), "score must be one of softmax, relu2, laplace, got 'cosine'"),
        (compress(SHORT, LONG, block=100), "block must be a positive multiple of 128, got 100"),
        (compress(SHORT, LONG, splits=0), "splits must be at least 1, got 0"),
        (compress(SHORT, LONG, gamma=None), "contrast_key and gamma belong together"),
        (compress(SHORT, LONG, gamma=jnp.ones(3)), r"gamma must have shape \(2,\), got \(3,\)"),
        (compress(SHORT, LONG, bias=jnp.zeros((1, 2, 5, 300))), r"bias must broadcast to \(1, 2, 16, 300\), got shape"),
        (compress(SHORT, LONG, mask=jnp.ones((16, 300), bool)), r"mask must broadcast to .* got shape \(16, 300\)"),
        (compress_blocks(MANY, shaped(1, 384, 2, 64), history_size=200, block_size=128),
         r"must hold .* = 200 \+ 2 \* 128 tokens, got 384"),
        (compress_blocks(MANY, shaped(1, 96, 2, 64), history_lengths=jnp.ones((3, 1), jnp.int32)),
         r"history_lengths must have shape \(1, 3\), got \(3, 1\)"),
        (propagate(LONG, SHORT, score="cosine"), "score must be one of softmax, relu2, laplace, got 'cosine'"),
        (propagate(LONG, SHORT, block=100), "block must be a positive multiple of 128, got 100"),
        (propagate(LONG, SHORT, heads=3), r"strength must have shape \(2,\), got \(3,\)"),
    ],
)  # fmt: skip
def test_bad_input(case, words):
    _, call, arrays, options, traced = case
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(functools.partial(call, **options, **traced), *arrays)


def test_lists_too_long_for_scalar_memory(monkeypatch):
    monkeypatch.setattr(tpu.block.plan, "MAX_PAIRS", 2)
    x = shaped(1, 512, 2, 64)
    unsupported, _, arrays, options, _ = block(x, key_blocks=[[0, 1, 2], [0], [0], [0]])
    assert unsupported(*arrays, **options) == (
        "a block of queries pairs with 3 others, but scalar memory holds 2: choose larger blocks"
    )
    unsupported, _, arrays, options, _ = block(x, key_blocks=[[0], [0], [0], []])
    assert "a block of keys pairs with 3 others" in unsupported(*arrays, **options)


def test_nothing_is_traced(monkeypatch):
    """Makes no array and builds no kernel, however long the sequence."""

    def fail(*_, **__):
        raise AssertionError("traced")

    monkeypatch.setattr(jax, "eval_shape", fail)
    monkeypatch.setattr(jnp, "pad", fail)
    monkeypatch.setattr(tpu.window.api, "pack", fail)
    assert tpu.window_unsupported(*[shaped(1, 1 << 20, 8, 128)] * 3, left=511, right=0) is None
