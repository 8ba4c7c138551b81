"""Cases of the GPU kernels: each compares results and gradients with the oracle. `pytest -m gpu` runs them natively.

`python -m tests.pallas_kernels.triton.cases FILE`, with TRITON_INTERPRET=1 in the environment, runs all of them and
writes each result: an empty text, or why the case failed."""

import functools
import json
import os
import sys
import traceback
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import brl_jax
from brl_jax.attention.local import far_patterns, patterns
from pallas_kernels import triton
from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.recurrent import api as recurrent_api
from pallas_kernels.triton.selected import api
from tests.oracles import kernels as oracle

#: The implementation that runs the kernels in this process.
KERNELS = "triton_interpret" if bridge.interprets() else "triton"
ENDS = np.iinfo(np.int32)
TOLERANCE = {"float32": 2e-5, "float16": 5e-3}


def random(seed, *shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(names, got, want, dtype):
    for name, a, b in zip(names, got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        top = max(1.0, float(np.abs(b[np.isfinite(b)]).max(initial=0.0)))
        np.testing.assert_allclose(a / top, b / top, atol=TOLERANCE[dtype], rtol=0, err_msg=name)


def local(
    pattern, *, length=100, keys=None, offset=0, heads=(2, 1), head_dim=16, batch=1, is_causal=False,
    dtype="float32", segments=None, lengths=None, sinks=None, cap=None,
):  # fmt: skip
    """One call with a pattern of the library, against the dense form."""
    keys = length if keys is None else keys
    query = random(0, batch, length, heads[0], head_dim, dtype=dtype)
    key, value = (random(seed, batch, keys, heads[1], head_dim, dtype=dtype) for seed in (1, 2))
    if isinstance(pattern, (patterns.SlidingWindow, patterns.Dilated)):
        before, after = pattern.limits
        rectangles = tuple(
            (i, i + 16, i + offset - before, i + offset + 16 + after) for i in range(0, length, 16)
        )
    else:
        rectangles = ((0, length, 0, keys),)
    rule = triton.Pattern(rectangles, pattern.visible, is_causal, length, keys, offset, 0)
    at_query, at_key = np.arange(length)[:, None] + offset, np.arange(keys)[None, :]
    seen = np.broadcast_to(np.asarray(pattern.visible(at_query, at_key, rule.num_positions)), (length, keys))
    if is_causal:
        seen = seen & (at_key <= at_query)
    seen = np.repeat(seen[None], batch, axis=0)
    options = {}
    if segments is not None:
        ids = [
            np.random.default_rng(seed).choice(segments, (batch, size)).astype(np.int32)
            for seed, size in ((3, length), (4, keys))
        ]
        options |= {"query_segment_ids": jnp.asarray(ids[0]), "key_segment_ids": jnp.asarray(ids[1])}
        seen = seen & (ids[0][:, :, None] == ids[1][:, None, :])
    if lengths is not None:
        inside = np.arange(keys)[None] < np.asarray(lengths)[:, None]
        seen = seen & inside[:, None, :]
        # The contents of padding must reach nothing.
        key, value = (jnp.where(inside[:, :, None, None], x, jnp.nan) for x in (key, value))
        options["key_lengths"] = jnp.asarray(lengths)
    run = functools.partial(
        triton.local_attention, pattern=rule, return_log_sum_exp=True, logits_soft_cap=cap, **options
    )
    given, names = (query, key, value), ("out", "log_sums", "d_query", "d_key", "d_value")
    if sinks is None:
        (out, log_sums), pull = jax.vjp(run, *given)
    else:
        sinks, names = jnp.asarray(sinks), (*names, "d_sinks")
        (out, log_sums), pull = jax.vjp(lambda *x: run(*x[:3], sinks=x[3]), *given, sinks)
    d_out = random(5, *out.shape, dtype=dtype)
    d_log_sums = random(6, *log_sums.shape, dtype="float32")
    want = oracle.attention(
        query, np.nan_to_num(key), np.nan_to_num(value), seen, head_dim**-0.5, d_out, d_log_sums, sinks=sinks, cap=cap
    )  # fmt: skip
    blind = ~seen.any(-1) & (sinks is None)
    np.testing.assert_array_equal(np.isneginf(log_sums), np.broadcast_to(blind[..., None], log_sums.shape))
    log_sums, expected = (np.where(blind[..., None], 0.0, x) for x in (log_sums, want[1]))
    close(names, (out, log_sums, *pull((d_out, d_log_sums))), (want[0], expected, *want[2:]), dtype)


def compress(
    score,
    *,
    length=100,
    tokens=20,
    heads=2,
    head_dim=24,
    batch=2,
    dtype="float32",
    lengths=None,
    contrast=True,
):
    query = random(0, batch, tokens, heads, head_dim, dtype=dtype)
    key, contrast_key, value = (random(i, batch, length, heads, head_dim, dtype=dtype) for i in (1, 2, 3))
    gamma = jnp.linspace(0.2, 0.9, heads)
    seen = np.ones((batch, 1, 1, length), bool)
    clean = key, contrast_key, value
    if lengths is not None:
        inside = np.arange(length)[None] < np.asarray(lengths)[:, None]
        seen = inside[:, None, None]
        key, contrast_key, value = (jnp.where(inside[:, :, None, None], x, jnp.nan) for x in clean)
        lengths = jnp.asarray(lengths)
    options = {"scale": head_dim**-0.5, "score": score, "key_lengths": lengths}
    d_out = random(5, *query.shape, dtype=dtype)
    operands = query, *clean, gamma
    if not contrast:
        operands = query, clean[0], None, clean[2], None
    want = oracle.compress(*operands, options["scale"], score, d_out, seen)
    if contrast:
        run = lambda q, k, c, v, g: triton.compress(q, k, c, v, gamma=g, **options)  # noqa: E731
        out, pull = jax.vjp(run, query, key, contrast_key, value, gamma)
    else:
        run = lambda q, k, v: triton.compress(q, k, None, v, gamma=None, **options)  # noqa: E731
        out, pull = jax.vjp(run, query, key, value)
    names = ("out", "d_query", "d_key", "d_contrast_key", "d_value", "d_gamma")
    close(names[: len(want)], (out, *pull(d_out)), want, dtype)


def recurrence(
    kind, *, length=150, batch=1, heads=(2, 2), features=24, values=20, dtype="float32", decay=0.1, lengths=None,
    ids=None, stateful=True,
):  # fmt: skip
    """One call of a kind, whose name combines "sum", "weights", "decay", "feature" and "delta".

    decay: the mean of the logarithms, or "mixed" for some very strong ones and some -inf."""
    rng = np.random.default_rng(0)
    query = random(0, batch, length, heads[0], features, dtype=dtype)
    key, value = (random(i, batch, length, heads[1], n, dtype=dtype) for i, n in ((1, features), (2, values)))
    key = key / jnp.sqrt(jnp.sum(jnp.square(key), -1, keepdims=True)).astype(dtype)
    given = {"key_value": random(3, batch, heads[1], features, values, dtype="float32")}
    if not stateful:
        given["key_value"] *= 0
    if "weights" in kind:
        given["key_sum"] = random(4, batch, heads[1], features, dtype="float32")
        query, key = (jnp.abs(x) for x in (query, key))
    if "decay" in kind:
        logs = rng.exponential(1.0, key.shape[: 4 if "feature" in kind else 3])
        strengths = [0.01, 1.0, 50.0, np.inf] if decay == "mixed" else [decay]
        given["log_decay"] = jnp.asarray(-logs * rng.choice(strengths, logs.shape), jnp.float32)
    if "delta" in kind:
        given["beta"] = jnp.asarray(rng.uniform(0, 1.5, key.shape[:3]), jnp.float32)
    given |= {"query": query, "key": key, "value": value}
    if ids is not None or lengths is not None:
        numbers = np.zeros((batch, length), np.int32) if ids is None else np.repeat(range(len(ids)), ids)
        numbers = np.broadcast_to(numbers, (batch, length))
        there = (
            np.arange(length)[None] < np.asarray([length] * batch if lengths is None else lengths)[:, None]
        )
        given["segments"] = jnp.asarray(np.where(there, numbers, -1), jnp.int32)
        for name in ("query", "key", "value", "log_decay", "beta"):
            if name in given:
                given[name] = jnp.where(
                    there.reshape(*there.shape, *(1,) * (given[name].ndim - 2)), given[name], 0
                )
    names = [name for name in given if name != "segments"]

    def run(*arrays):
        operands = dict(zip(names, arrays)) | {n: x for n, x in given.items() if n == "segments"}
        found = triton.recurrence(triton.Operands(**operands))._asdict()
        return {name: x for name, x in found.items() if x is not None}

    found, pull = jax.vjp(run, *(given[name] for name in names))
    gradients = {name: random(10 + i, *x.shape, dtype=x.dtype) for i, (name, x) in enumerate(found.items())}
    want, d_want = oracle.recurrence(given, gradients)
    d_found = dict(zip(names, pull(gradients)))
    order = [*want]
    close(order, [found[name] for name in order], [want[name] for name in order], dtype)
    close(names, [d_found[name] for name in names], [d_want[name] for name in names], dtype)


def on_ampere(case):
    """Runs the case as an A100 would."""
    os.environ["BRL_JAX_GPU_CAPABILITY"] = "80"
    try:
        case()
    finally:
        del os.environ["BRL_JAX_GPU_CAPABILITY"]


def propagate(score, *, length=100, tokens=20, heads=2, head_dim=24, batch=2, dtype="float32"):
    query = random(0, batch, length, heads, head_dim, dtype=dtype)
    key, value = (random(i, batch, tokens, heads, head_dim, dtype=dtype) for i in (1, 2))
    strength = jnp.linspace(0.2, 0.9, heads)
    run = lambda q, k, v, s: triton.propagate(q, k, v, strength=s, scale=head_dim**-0.5, score=score)  # noqa: E731
    out, pull = jax.vjp(run, query, key, value, strength)
    d_out = random(5, *out.shape, dtype=dtype)
    want = oracle.propagate(query, key, value, strength, head_dim**-0.5, score, d_out)
    close(("out", "d_query", "d_key", "d_value", "d_strength"), (out, *pull(d_out)), want, dtype)


def gau(
    *, length=100, heads=(2, 1), head_dim=24, value_dim=40, is_causal=True, dtype="float32", bias=False,
    ids=None, lengths=None, before=0,
):  # fmt: skip
    """`brl_jax.gau_attention` in a batch of two on the kernel, against the dense form in float64.

    ids are the segments' lengths, in this order in row 0 and reversed in row 1. A state already holds `before` tokens
    of row 1, and three fewer of row 0."""
    batch, total = 2, length + before
    query = random(0, batch, length, heads[0], head_dim, dtype=dtype)
    key = random(1, batch, total, heads[1], head_dim, dtype=dtype)
    value = random(2, batch, total, heads[1], value_dim, dtype=dtype)
    vectors = [random(seed, heads[0], 8, dtype="float32") for seed in (3, 4)]
    options = {"is_causal": is_causal, "chunk_size": 16, "implementation": KERNELS}
    starts = np.maximum(before - np.asarray([3, 0]), 0)
    at_query, at_key = np.arange(length)[None, :, None] + starts[:, None, None], np.arange(total)[None, None]
    seen = np.broadcast_to(at_key <= at_query if is_causal else True, (batch, length, total))
    if ids is not None:
        numbers = np.stack([np.repeat(np.arange(len(ids)), row) for row in (ids, ids[::-1])])
        options["segment_ids"] = jnp.asarray(numbers)
        seen = seen & (numbers[:, :, None] == numbers[:, None])
    clean_key, clean_value = key, value
    if lengths is not None:
        options["key_value_seq_lengths"] = jnp.asarray(lengths)
        inside = np.arange(total)[None] < np.asarray(lengths)[:, None]
        seen = seen & inside[:, None]
        key, value = (jnp.where(inside[:, :, None, None], x, jnp.nan) for x in (key, value))
        if is_causal:  # a padded query gives 0
            query = jnp.where(inside[:, :length, None, None], query, 0)
    weights = np.maximum(seen.sum(-1), 1)[..., None, None]

    def run(query, key, value, *vectors):
        more = dict(options)
        if bias:
            more["bias"] = brl_jax.RotaryBias(*vectors)
        if before:
            state = brl_jax.init_gau_state(batch, heads[1], head_dim, value_dim, length=total, dtype=dtype)
            more["state"] = state._replace(
                key=key.at[:, before:].set(0), value=value.at[:, before:].set(0), length=jnp.asarray(starts)
            )
            key, value = key[:, before:], value[:, before:]
        return brl_jax.gau_attention(query, key, value, **more)

    out, pull = jax.vjp(run, query, key, value, *vectors)
    d_out = random(5, *out.shape, dtype=dtype)

    def moved(x):
        """Row 0's new tokens lie three positions further left."""
        if not before:
            return x
        row = jnp.concatenate([x[0, : before - 3], x[0, before:], jnp.zeros_like(x[0, :3])])
        return jnp.stack([row, x[1]])

    def dense(query, key, value, *vectors):
        rows, columns = query / weights, moved(key)
        turned = map(oracle.rotated, vectors, (at_query[:, :, 0], np.repeat(at_key[:, 0], batch, 0)))
        if vectors:
            rows, columns = (jnp.concatenate([x, y], -1) for x, y in zip((rows, columns), turned))
        return oracle.squared_relu(rows, columns, moved(value), seen)

    expected = oracle.in_float64(dense, d_out, query, clean_key, clean_value, *(vectors if bias else ()))
    got = (out, *pull(d_out))
    names = ("out", "d_query", "d_key", "d_value", "d_left", "d_right")[: len(expected)]
    close(names, got[: len(expected)], expected, dtype)


def selected(
    *,
    length=50,
    keys=None,
    heads=(4, 2),
    head_dim=24,
    batch=2,
    size=6,
    blocks=4,
    ends=None,
    parts=2048,
    dtype="float32",
):
    """Each token selects blocks within its sequence; compares with the dense form. `ends` are the last tokens of
    sequences, and each sequence numbers its blocks from zero. parts: pairs in a part of a tile's gradient."""
    keys = length if keys is None else keys
    rng = np.random.default_rng(7)
    query = random(0, batch, length, heads[0], head_dim, dtype=dtype)
    key, value = (random(i, batch, keys, heads[1], head_dim, dtype=dtype) for i in (1, 2))
    positions = np.broadcast_to(np.arange(keys - length, keys, dtype=np.int32), (batch, length))
    bounds = [0, *(ends or ()), keys]
    first = np.asarray([max(b for b in bounds if b <= p) for p in positions[0]])
    starts = np.full((batch, length, heads[1], blocks), keys, np.int32)
    seen = np.zeros((batch, heads[1], length, keys), bool)
    for b, t, h in np.ndindex(batch, length, heads[1]):
        own = (positions[b, t] - first[t]) // size
        chosen = {own, 0, *rng.permutation(own + 1)[: rng.integers(0, blocks - 1)]}
        for slot, block in enumerate(rng.permutation(sorted(chosen))):
            start = starts[b, t, h, slot] = first[t] + block * size
            seen[b, h, t, start : min(start + size, positions[b, t] + 1)] = True
    run = functools.partial(
        triton.selected_attention,
        starts=jnp.asarray(starts),
        positions=jnp.asarray(positions),
        size=size,
        scale=0.3,
    )
    with mock.patch.object(api, "_PAIRS_OF_PART", parts):
        out, pull = jax.vjp(run, query, key, value)
        assert out.dtype == jnp.float32
        d_out = random(5, *out.shape, dtype="float32")
        gradients = pull(d_out)
    seen = np.repeat(seen, heads[0] // heads[1], axis=1)
    out_wanted, _, *expected = oracle.attention(query, key, value, seen, 0.3, d_out)
    close(("out", "d_query", "d_key", "d_value"), (out, *gradients), (out_wanted, *expected), dtype)


def mapped():
    """vmap is one launch on a longer batch, and equals separate calls."""
    query = random(0, 3, 2, 40, 2, 16, dtype="float32")
    rule = triton.Pattern(((0, 40, 0, 40),), patterns.SlidingWindow(9, 0).visible, True, 40, 40)
    run = lambda q: triton.local_attention(q, q, q, pattern=rule)  # noqa: E731
    np.testing.assert_allclose(jax.vmap(run)(query), jnp.stack([run(q) for q in query]), atol=1e-6)
    strength = jnp.asarray([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    run = lambda q, s: triton.propagate(q, q[:, :8], q[:, :8], strength=s, scale=0.25)  # noqa: E731
    one_by_one = jnp.stack([run(q, s) for q, s in zip(query, strength)])
    np.testing.assert_allclose(jax.vmap(run)(query, strength), one_by_one, atol=1e-6)


def mapped_gradient():
    """A mapped gradient has a longer batch than its forward pass, which cut the row into three spans. Alone it would
    take two."""
    length = 200 if bridge.interprets() else 776
    shapes = (*3 * [(1, length, 1, 16)], (1, 1, 16, 16), (1, length, 1))
    query, key, value, state, beta = (random(i, *shape, dtype="float32") for i, shape in enumerate(shapes))

    def last_state(query, key, value, state, beta):
        operands = triton.Operands(query, key / 4, value, state, beta=jax.nn.sigmoid(beta))
        return triton.recurrence(operands).key_value

    with mock.patch.object(recurrent_api, "MULTIPROCESSORS", 2):
        out, pull = jax.vjp(last_state, query, key, value, state, beta)
        d_out = random(5, 2, *out.shape, dtype="float32")
        want = [jnp.stack(each) for each in zip(*map(pull, d_out))]
        close(("d_query", "d_key", "d_value", "d_state", "d_beta"), jax.vmap(pull)(d_out), want, "float32")


def not_a_number():
    """NaN stays NaN behind the ReLU, the bound on decays and the rounding to TF32's digits, as through XLA."""
    query = random(0, 1, 40, 2, 16, dtype="float32").at[0, 20].set(jnp.nan)
    few = random(1, 1, 8, 2, 16, dtype="float32")
    out = triton.propagate(query, few, few, strength=jnp.ones(2), scale=0.25, score="relu2")
    np.testing.assert_array_equal(jnp.isnan(out).all((0, 2, 3)), np.arange(40) == 20)
    query = key = random(0, 1, 40, 2, 16, dtype="float32") / 4
    operands = triton.Operands(query, key, query, jnp.zeros((1, 2, 16, 16)), beta=jnp.ones((1, 40, 2)))
    for shape in ((1, 40, 2), (1, 40, 2, 16)):
        log_decay = jnp.zeros(shape).at[0, 20].set(jnp.nan)
        for beta in (None, operands.beta):
            found = triton.recurrence(operands._replace(beta=beta, log_decay=log_decay))
            assert jnp.isnan(found.total[:, 20:]).all()
            assert jnp.isnan(found.key_value).all()
    state = jnp.asarray(np.full((1, 2, 16, 16), 0x7FFFFFFF, np.uint32).view(np.float32))  # a GPU's own NaN
    arrays = {name: getattr(operands, name).astype(jnp.float16) for name in ("query", "key", "value")}
    assert jnp.isnan(triton.recurrence(operands._replace(key_value=state, **arrays)).total).all()


def sharded():
    """Under `shard_map` devices share some arrays, whose gradients are summed over them."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.P("rows"), jax.P()
    query = random(0, 2, 40, 2, 16, dtype="float32")
    few, heads = random(1, 1, 8, 2, 16, dtype="float32"), jnp.asarray([0.3, 0.7])
    calls = {
        "local": lambda q, f, s, i: brl_jax.local_attention(
            q, jnp.tile(f, (1, 5, 1, 1)), q, local_window_size=5, sinks=s, implementation=i
        ),
        "compress": lambda q, f, s, i: brl_jax.compress(f, q, q, q, gamma=s, implementation=i),
        "propagate": lambda q, f, s, i: brl_jax.propagate(q, f, f, strength=s, implementation=i),
    }
    for name, call in calls.items():

        def loss(*arrays, call=call, implementation):
            run = lambda q, f, s: call(q, f, s, implementation)  # noqa: E731
            mapped = jax.shard_map(run, mesh=mesh, in_specs=(rows, shared, shared), out_specs=rows)
            return jnp.sum(mapped(*arrays) ** 2)

        got, want = (
            jax.jit(jax.grad(functools.partial(loss, implementation=i), (0, 1, 2)))(query, few, heads)
            for i in (KERNELS, "xla")
        )
        close([f"{name} {what}" for what in ("query", "few", "heads")], got, want, "float32")


def public(pattern, *, is_causal=False, offset=0, **options):
    """`brl_jax.local_attention` on the kernel and through XLA, forward and backward, under jit."""
    length = 90
    query, key, value = (random(i, 1, length + i // 3 * offset, 2, 16, dtype="float32") for i in (0, 3, 4))
    d_out = random(5, *query.shape, dtype="float32")

    def run(implementation):
        @jax.jit
        def both(query, key, value):
            call = functools.partial(
                brl_jax.local_attention, pattern=pattern, is_causal=is_causal, query_offset=offset, **options
            )
            out, pull = jax.vjp(functools.partial(call, implementation=implementation), query, key, value)
            return out, *pull(d_out)

        return both(query, key, value)

    close(("out", "d_query", "d_key", "d_value"), run(KERNELS), run("xla"), "float32")


def public_compress_blocks(score="softmax", contrast=True, tokens=12, dtype="float32"):
    """`brl_jax.compress_blocks` on the kernel against each block in float64, with lengths, a window of no whole number
    of blocks, and NaN in the keys that no block reads. Lengths beyond the window count as all of it."""
    batch, blocks, block_size, history = 2, 3, 14, 33
    query = random(0, batch, blocks, tokens, 2, 16, dtype=dtype)
    clean = [random(i, batch, 80, 2, 16, dtype=dtype) for i in (1, 2, 3)]
    gamma = jnp.asarray([0.3, 0.7])
    lengths = np.asarray([[0, 20, 33], [5, 25, 33]])
    place = np.arange(80) - block_size * np.arange(blocks)[:, None]
    read = ((place >= history - lengths[..., None]) & (place < history)).any(1)
    key, contrast_key, value = (jnp.where(read[..., None, None], x, jnp.nan) for x in clean)

    @jax.jit
    def run(lengths, query, key, contrast_key, value, gamma):
        return brl_jax.compress_blocks(
            query, key, contrast_key if contrast else None, value, gamma=gamma if contrast else None,
            block_size=block_size, history_size=history, score=score, history_lengths=lengths,
            implementation=KERNELS,
        )  # fmt: skip

    given = jnp.asarray(np.where(lengths == history, 99, lengths))
    out, pull = jax.vjp(functools.partial(run, given), query, key, contrast_key, value, gamma)
    d_out = random(5, *out.shape, dtype=dtype)

    def each_block(query, key, contrast_key, value, gamma):
        outs = []
        for block in range(blocks):
            at = slice(block * block_size, block * block_size + history)
            seen = np.arange(history)[None] >= history - lengths[:, block, None]
            keys = key[:, at], contrast_key[:, at] if contrast else None, value[:, at]
            arrays = query[:, block], *keys, gamma, 1 / (4 * tokens)
            outs.append(oracle.contrasted(*arrays, score, seen[:, None, None]))
        return jnp.stack(outs, 1)

    want = oracle.in_float64(each_block, d_out, query, *clean, gamma)
    names = ("out", "d_query", "d_key", "d_contrast_key", "d_value", "d_gamma")
    close(names, (out, *pull(d_out)), want, dtype)


SLIDING = patterns.SlidingWindow
MASK = far_patterns.BlockMask.of(16, np.random.default_rng(7).random((8, 8)) < 0.4)

CASES = {
    "window-causal-grouped": lambda: local(SLIDING(20, 0), heads=(4, 2), batch=2, is_causal=True),
    "window-both-sides-odd-head": lambda: local(SLIDING(5, 7), length=64, head_dim=24),
    "window-wider-than-the-sequence": lambda: local(SLIDING(200, 0), length=70, is_causal=True),
    "window-after-a-cache": lambda: local(SLIDING(20, 0), length=13, keys=40, offset=27, is_causal=True),
    "window-float16": lambda: local(SLIDING(20, 0), dtype="float16", is_causal=True),
    "window-segments": lambda: local(SLIDING(30, 30), segments=[7, 8]),
    "window-segments-of-padding": lambda: local(SLIDING(30, 30), segments=[-1, -2], lengths=[70]),
    "window-segments-at-the-ends": lambda: local(SLIDING(30, 0), segments=[ENDS.min, ENDS.max], lengths=[61]),
    "window-lengths": lambda: local(SLIDING(31, 31), batch=2, lengths=[33, 0]),
    "window-sinks": lambda: local(
        SLIDING(30, 3), batch=2, lengths=[61, 0], segments=[1, 2], sinks=[0.7, -1.0]
    ),
    "window-soft-cap": lambda: local(SLIDING(20, 0), is_causal=True, cap=0.8),
    "window-sinks-and-soft-cap": lambda: local(
        SLIDING(20, 0), heads=(4, 2), sinks=[2.0, 0.0, -9.0, 1.0], cap=0.8
    ),
    "dilated": lambda: local(patterns.Dilated(4, 4, 4), length=130),
    "block-diagonal": lambda: local(patterns.BlockDiagonal(24), is_causal=True),
    "bucketed": lambda: local(patterns.Bucketed(16)),
    "strided": lambda: local(far_patterns.Strided(16), is_causal=True),
    "fixed": lambda: local(far_patterns.Fixed(16, 2), is_causal=True),
    "global": lambda: local(far_patterns.GlobalWindow(8, 8, 5)),
    "bigbird": lambda: local(far_patterns.BigBird(8), length=90),
    "block-mask": lambda: local(MASK, length=128),
    "compress-softmax": lambda: compress("softmax"),
    "compress-softmax-lengths": lambda: compress("softmax", lengths=[81, 0]),
    "compress-softmax-one-attention": lambda: compress("softmax", contrast=False),
    "compress-softmax-float16": lambda: compress("softmax", dtype="float16"),
    "compress-softmax-many-tokens": lambda: compress("softmax", tokens=100, head_dim=16, batch=1),
    "compress-ampere": lambda: on_ampere(lambda: compress("softmax", tokens=100, lengths=[81, 0])),
    "compress-ampere-wide": lambda: on_ampere(lambda: compress("softmax", head_dim=80, dtype="float16")),
    "compress-ampere-relu2": lambda: on_ampere(lambda: compress("relu2", tokens=70, lengths=[81, 40])),
    "compress-ampere-one-attention": lambda: on_ampere(
        lambda: compress("softmax", tokens=128, contrast=False)
    ),
    "compress-relu2": lambda: compress("relu2", lengths=[81, 40]),
    "compress-laplace": lambda: compress("laplace", lengths=[81, 40]),
    "propagate-softmax": lambda: propagate("softmax"),
    "propagate-softmax-many-tokens": lambda: propagate("softmax", tokens=200, head_dim=16),
    "propagate-softmax-float16": lambda: propagate("softmax", dtype="float16"),
    "propagate-relu2": lambda: propagate("relu2"),
    "propagate-laplace": lambda: propagate("laplace"),
    "selected": lambda: selected(),
    "selected-of-large-groups": lambda: selected(heads=(6, 2), size=16, head_dim=16, length=70),
    "selected-one-query-head": lambda: selected(heads=(2, 2), size=3, blocks=5),
    "selected-packed": lambda: selected(ends=[7, 8, 31], size=4),
    "selected-after-a-cache": lambda: selected(length=5, keys=41),
    "selected-in-many-parts": lambda: selected(parts=8, batch=1),
    "selected-float16": lambda: selected(dtype="float16"),
    "gau-causal-grouped": lambda: gau(heads=(4, 2)),
    "gau-both-sides": lambda: gau(is_causal=False, lengths=[100, 37]),
    "gau-lengths": lambda: gau(lengths=[61, 0]),
    "gau-segments": lambda: gau(ids=[30, 1, 16, 53]),
    "gau-segments-both-sides": lambda: gau(ids=[30, 1, 16, 53], is_causal=False, lengths=[90, 40]),
    "gau-bias": lambda: gau(heads=(2, 2), bias=True),
    "gau-bias-after-a-state": lambda: gau(heads=(2, 2), bias=True, length=40, before=27),
    "gau-float16": lambda: gau(dtype="float16"),
    "sum": lambda: recurrence("sum"),
    "sum-weights": lambda: recurrence("sum-weights", heads=(4, 2)),
    "sum-decay": lambda: recurrence("sum-decay", heads=(4, 2), values=40),
    "sum-feature-decay": lambda: recurrence("sum-feature-decay", heads=(4, 2), values=40),
    "sum-feature-decay-packed": lambda: recurrence(
        "sum-feature-decay", ids=[37, 60, 1, 22], length=120, heads=(2, 1)
    ),
    "delta-feature-decay": lambda: recurrence("delta-feature-decay", heads=(4, 2), values=40),
    "delta-feature-decay-packed": lambda: recurrence(
        "delta-feature-decay", ids=[37, 70, 1, 42], heads=(2, 1)
    ),
    "sum-packed": lambda: recurrence("sum-weights", ids=[37, 60, 1, 22], length=120),
    "sum-decay-packed": lambda: recurrence("sum-decay", ids=[37, 60, 1, 22], length=120),
    **{
        f"{kind}-lengths-{dtype}": functools.partial(
            recurrence,
            kind,
            batch=2,
            heads=(2, 1),
            values=16,
            lengths=[length, 45],
            length=length,
            decay="mixed",
            dtype=dtype,
        )
        for kind, length in (
            ("sum", 90),
            ("sum-weights", 90),
            ("sum-decay", 90),
            ("sum-feature-decay", 90),
            ("delta", 130),
            ("delta-decay", 130),
            ("delta-feature-decay", 130),
        )
        for dtype in ("float32", "float16")
    },
    "delta": lambda: recurrence("delta", heads=(2, 1), length=130),
    "delta-packed": lambda: recurrence("delta", ids=[37, 70, 1, 42], heads=(1, 1)),
    "delta-decay-packed": lambda: recurrence(
        "delta-decay", ids=[37, 70, 1, 42], heads=(1, 1), stateful=False
    ),
    "vmap": mapped,
    "vmap-of-a-gradient": mapped_gradient,
    "not-a-number": not_a_number,
    "shard-map": sharded,
    "public-window": lambda: public(SLIDING(20, 0), is_causal=True),
    "public-window-after-a-cache": lambda: public(SLIDING(20, 0), is_causal=True, offset=30),
    "public-global": lambda: public(
        far_patterns.GlobalWindow(8, 8, 5), key_value_seq_lengths=jnp.asarray([80])
    ),
    "public-bigbird": lambda: public(far_patterns.BigBird(8)),
    "public-block-mask": lambda: public(MASK),
    "public-bucketed-at-an-offset": lambda: public(patterns.Bucketed(16), is_causal=True, key_offset=5),
    "public-compress-blocks": public_compress_blocks,
    "public-compress-blocks-relu2": lambda: public_compress_blocks("relu2"),
    "public-compress-blocks-one-attention": lambda: public_compress_blocks(contrast=False),
    "public-compress-blocks-many-tokens": lambda: public_compress_blocks(tokens=40, dtype="float16"),
    "public-sinks": lambda: public(SLIDING(20, 0), sinks=jnp.asarray([0.5, -0.5]), logits_soft_cap=0.8),
    "public-dilated": lambda: public(patterns.Dilated(4, 4, 3)),
}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    found = {}
    for name in sys.argv[2:]:
        try:
            CASES[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-3000:]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
