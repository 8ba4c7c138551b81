"""compress_blocks through XLA against the float64 oracle, for any number of blocks per step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import compress_blocks
from brl_jax.attention.compressed import compress_blocks as blocks_module
from tests.attention.compressed.cases import SCORES, arrays
from tests.marks import slow_unless
from tests.oracles.compressed import compress as oracle_compress
from tests.support.attention import check
from tests.support.numbers import relative_error

BLOCKS = 5
SHAPE = (2, BLOCKS, 3, 2, 4)  # B, C, M, N, H
on_xla = functools.partial(compress_blocks, implementation="xla")


def blocks_in_a_step(monkeypatch, count, history):
    """Clears the cache of programs traced with another number."""
    logits = count * SHAPE[0] * SHAPE[2] * SHAPE[3] * history
    monkeypatch.setattr("brl_jax.attention.compressed.xla_blocks._LOGITS", logits)
    blocks_module._choose_blocks.clear_cache()


def oracle_blocks(q, k1, k2, v, gamma, bias, *, block, history, exists, scale, score):
    outs = []
    for c in range(q.shape[1]):
        window = slice(c * block, c * block + history)
        mask = np.arange(history) >= history - exists[:, c][:, None, None, None]
        contrast = None if k2 is None else k2[:, window]
        operands = (q[:, c], k1[:, window], contrast, v[:, window], gamma)
        outs.append(oracle_compress(*operands, scale, score, bias[None], mask))
    return np.stack(outs, 1)


@pytest.mark.parametrize("step", slow_unless([1, 2, BLOCKS], (2,)))
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("block", "history"), [(4, 4), (4, 9), (4, 3), (5, 13), (7, 1)])
def test_each_block_reads_what_precedes_it(monkeypatch, block, history, score, step):
    """Outputs and gradients of all operands, in steps of one block, of two (with one left over) and of all."""
    blocks_in_a_step(monkeypatch, step, history)
    length = history + (BLOCKS - 1) * block
    keys = [(2, length, 2, 4)] * 3
    operands = arrays(3, SHAPE, *keys, (2,), (2, 3, history))
    exists = np.array([[0, 1, history, history, history], [history, 0, 1, history, 1]])
    common = {"scale": 0.7, "score": score}

    def function(q, k1, k2, v, gamma, bias):
        return on_xla(
            q, k1, k2, v, gamma=gamma, bias=bias, block_size=block, history_size=history,
            history_lengths=jnp.asarray(exists, jnp.int32), **common,
        )  # fmt: skip

    oracle = functools.partial(oracle_blocks, block=block, history=history, exists=exists, **common)
    check(function, oracle, operands)
    half = [jnp.asarray(x, jnp.bfloat16) for x in operands[:4]]
    rough = jax.jit(function)(*half, *(jnp.asarray(x, jnp.float32) for x in operands[4:]))
    assert rough.dtype == jnp.bfloat16
    assert relative_error(rough, oracle(*operands)) < 2e-2


@pytest.mark.parametrize("step", [1, 2])
def test_without_contrast_bias_and_lengths(monkeypatch, step):
    blocks_in_a_step(monkeypatch, step, 9)
    operands = arrays(4, SHAPE, (2, 25, 2, 4), (2, 25, 2, 4))
    every = np.full((2, BLOCKS), 9)

    def function(q, k, v):
        return on_xla(q, k, None, v, gamma=None, block_size=4, history_size=9)

    def oracle(q, k, v):
        options = {"block": 4, "history": 9, "exists": every, "scale": 1 / (3 * 2.0), "score": "softmax"}
        return oracle_blocks(q, k, None, v, None, np.zeros((2, 3, 9)), **options)

    check(function, oracle, operands)


@pytest.mark.parametrize("step", [1, 2])
def test_keys_that_no_block_reads_may_contain_anything(monkeypatch, step):
    """NaN before the existing keys, in what a last block without history would read, and after that reaches neither the
    result nor a gradient."""
    blocks_in_a_step(monkeypatch, step, 8)
    q, k1, k2, v = (jnp.asarray(x, jnp.float32) for x in arrays(5, SHAPE, *[(2, 27, 2, 4)] * 3))
    lengths = jnp.array([0, 4, 8, 8, 0])  # the first 8 keys do not exist, and the last block reads no keys
    dirty = [x.at[:, :8].set(jnp.nan).at[:, 20:].set(jnp.nan) for x in (k1, k2, v)]

    @jax.jit
    def run(q, *keys):
        def loss(q, k1, k2, v):
            options = {"gamma": 0.5, "block_size": 4, "history_size": 8, "history_lengths": lengths}
            return jnp.sum(on_xla(q, k1, k2, v, **options) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(q, *keys)

    clean, unclean = run(q, k1, k2, v), run(q, *dirty)
    for expected, actual in zip(jax.tree.leaves(clean), jax.tree.leaves(unclean)):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_lengths_are_ints_of_any_kind(dtype):
    """Places in a history may be larger than 8 bits can count."""
    q, k1, k2, v = (jnp.asarray(x, jnp.float32) for x in arrays(5, (1, 2, 3, 1, 4), *[(1, 250, 1, 4)] * 3))
    options = {"gamma": 0.3, "block_size": 50, "history_size": 200}
    lengths = [100, 127] if dtype == "int8" else [100, 200]
    expected = on_xla(q, k1, k2, v, history_lengths=jnp.asarray(lengths, jnp.int32), **options)
    for given in (np.asarray(lengths, dtype), lengths):
        np.testing.assert_array_equal(on_xla(q, k1, k2, v, history_lengths=given, **options), expected)


def test_memory_does_not_grow_with_the_overlap_of_histories():
    """Copying histories of 16 blocks would take 16 times the memory of the keys; so would the logits of all blocks."""
    batch, blocks, heads, width, block, history = 2, 64, 2, 32, 32, 512
    keys = jax.ShapeDtypeStruct((batch, history + (blocks - 1) * block, heads, width), jnp.float32)
    query = jax.ShapeDtypeStruct((batch, blocks, 32, heads, width), jnp.float32)

    def loss(q, k1, k2, v):
        return jnp.sum(on_xla(q, k1, k2, v, gamma=0.5, block_size=block, history_size=history))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(query, keys, keys, keys).compile()
    # What the backward pass needs: the three gradients of keys and values, plus outputs and queries.
    of_keys = 4 * np.prod(keys.shape)
    assert compiled.memory_analysis().temp_size_in_bytes < 12 * of_keys


def test_gpus_read_all_blocks_at_once():
    """If the kernel does not support them. On other platforms only a few blocks' logits exist at a time."""
    shape = (8, 16, 32, 4, 32)
    keys = jnp.zeros((8, 992, 4, 32))

    def function(q, k):
        return on_xla(q, k, None, k, gamma=None, block_size=32, history_size=512)

    traced = jax.jit(function).trace(jnp.zeros(shape), keys)
    on = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cuda", "cpu")}
    steps = [(name, rows) for name in on for rows in (128, 8) if f"tensor<{rows}x4x32x512xf32>" in on[name]]
    assert steps == [("cuda", 128), ("cpu", 8)]
