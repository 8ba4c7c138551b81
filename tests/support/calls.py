"""A small call of every public attention function, as a function of arrays whose first axis is the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import brl_jax as bj

LENGTH, HEADS, COMPRESSED, WIDTH = 9, 4, 3, 8


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _call(function, *names, **settings):
    """The function of query, key, value and arrays of these names; options of a call replace the settings."""

    def call(query, key, value, *more, **options):
        given = settings | dict(zip(names, more)) | options
        return function(query=query, key=key, value=value, **given)

    return call


def _compress_blocks(few, key, value, other):
    blocks = jnp.stack([few] * 3, 1)
    return bj.compress_blocks(blocks, key, other, value, gamma=0.3, block_size=3, history_size=3)


def _bilinear_mlr(kv_heads):
    # Each level is normalized over its features: with two of them, rounding decides the gradient's fourth digit.
    weights = [_normal(8, 1, WIDTH, HEADS, 4), _normal(9, 2, WIDTH // 2, HEADS, 4)]
    keys = [_normal(10, 1, WIDTH, kv_heads, 4), _normal(11, 2, WIDTH // 2, kv_heads, 4)]
    return lambda x, value: bj.bilinear_mlr_attention(
        x, value, query_weights=weights, key_weights=keys, is_causal=True
    )


def _bilinear_btt(x, value):
    right, left = _normal(12, 2, 4, HEADS, 2, 2), _normal(13, HEADS, 2, 4, 2, 2)
    return bj.bilinear_btt_attention(x, value, right=right, left=left, is_causal=True)


def _native_sparse(query, key, value):
    sizes = bj.BlockSizes(compressed=2, stride=1, selected=2, blocks=4)
    blocks = (bj.compression_blocks(x, sizes).mean(2) for x in (key, value))
    return bj.native_sparse_attention(query, key, value, *blocks, query[..., :3], sizes=sizes, window=3)


def _linear_decayed(q, k, v, beta, gate, **options):
    settings = {"normalize": False, "feature_map": "elu", "is_causal": True, "chunk_size": 4}
    settings["log_decay"] = -3 * beta[..., None] * jax.nn.sigmoid(gate)
    return bj.linear_attention(q, k, v, **settings | options)


def _gated_delta(q, k, v, beta, **options):
    settings = {"beta": beta, "log_decay": -3 * beta[..., ::-1], "chunk_size": 4}
    return bj.gated_delta_rule(q, k, v, **settings | options)


def _kimi_delta(q, k, v, beta, gate, **options):
    settings = {"beta": beta, "log_decay": -3 * jax.nn.sigmoid(gate), "chunk_size": 4}
    return bj.kimi_delta_rule(q, k, v, **settings | options)


def _gated_delta_2(q, k, v, beta, gate, write=None, **options):
    settings = {
        "erase": jax.nn.sigmoid(gate[..., ::-1]),
        "write": beta[..., None] * jnp.cos(v) if write is None else write,
        "log_decay": -3 * jax.nn.sigmoid(gate),
        "chunk_size": 4,
    }
    return bj.gated_delta_rule_2(q, k, v, **settings | options)


def _rwkv7(q, k, v, beta, gate, **options):
    settings = {
        "removal_key": gate[..., ::-1],
        "learning_rate": beta[..., None] * jax.nn.sigmoid(gate),
        "log_decay": -3 * jax.nn.sigmoid(gate),
        "chunk_size": 4,
    }
    return bj.rwkv7_attention(q, k, v, **settings | options)


def make_calls(length=LENGTH, kv_heads=2, head_dim=4):
    """name -> (function from a batch size to its arrays, the call with these arrays and options)."""

    def tokens(seed, heads, count=length, features=head_dim):
        return lambda batch: _normal(seed, batch, count, heads, features)

    def arrays(*makers):
        return lambda batch: tuple(make(batch) for make in makers)

    query, key, value = tokens(1, HEADS), tokens(2, kv_heads), tokens(3, kv_heads)
    few, few_values = tokens(4, HEADS, COMPRESSED), tokens(6, HEADS, COMPRESSED)
    every_key, every_value, other = (tokens(seed, HEADS) for seed in (2, 3, 5))
    gate = tokens(7, kv_heads)

    def beta(batch):
        return jax.nn.sigmoid(_normal(14, batch, length, kv_heads))

    def sort_logits(batch):
        blocks = -(-length // 4)
        return _normal(18, batch, blocks, kv_heads, blocks)

    qkv, history = arrays(query, key, value), arrays(few, every_key, every_value, other)
    with_beta, with_gate = arrays(query, key, value, beta), arrays(query, key, value, beta, gate)
    features = arrays(lambda batch: _normal(6, batch, length, WIDTH), value)
    causal = {"is_causal": True}
    chunks = {"is_causal": True, "chunk_size": 4}
    halves = {"ranks": (head_dim // 2,) * 2}
    columns = _normal(21, length + 3, HEADS, 3)
    projections = {"key_projection": _normal(15, 3, length), "value_projection": _normal(16, 3, length)}
    rotations = _normal(19, 2, head_dim, 2)
    alibi = bj.ALiBi(bj.alibi_slopes(HEADS))

    def reformer(q, k, v, **options):
        return bj.reformer_attention(q, v, **{"rotations": rotations, "chunk_size": 2} | causal | options)

    def synthesizer(v, **options):
        given = {"value": v, "rows": columns[:length], "columns": columns}
        return bj.synthesizer_attention(**given | causal | options)

    return {
        "full": (qkv, _call(bj.full_attention, **causal)),
        "local": (qkv, _call(bj.local_attention, local_window_size=(2, 0))),
        "local_both_sides": (qkv, _call(bj.local_attention, local_window_size=(2, 1))),
        "local_strided": (qkv, _call(bj.local_attention, pattern=bj.Strided(3), **causal)),
        "local_alibi": (qkv, _call(bj.local_attention, local_window_size=2, bias=alibi)),
        "compress": (history, _call(bj.compress, "contrast_key", gamma=0.3)),
        "compress_blocks": (history, _compress_blocks),
        "propagate": (arrays(query, few, few_values), _call(bj.propagate, strength=0.5)),
        "linear": (qkv, _call(bj.linear_attention, **chunks)),
        "linear_decayed": (with_gate, _linear_decayed),
        "norm": (qkv, _call(bj.norm_attention, **chunks)),
        "performer": (qkv, _call(bj.performer_attention, projection=_normal(17, 8, head_dim), **chunks)),
        "cosformer": (qkv, _call(bj.cosformer_attention, max_length=16, **chunks)),
        "delta": (with_beta, _call(bj.delta_rule, "beta", chunk_size=4)),
        "gated_delta": (with_beta, _gated_delta),
        "kimi_delta": (with_gate, _kimi_delta),
        "gated_delta_2": (with_gate, _gated_delta_2),
        "rwkv7": (with_gate, _rwkv7),
        "gau": (qkv, _call(bj.gau_attention, **chunks)),
        "mixed_chunk": (
            qkv,
            lambda q, k, v, **o: bj.mixed_chunk_attention(q, k, q, k, v, **chunks | o),
        ),
        "bsbr": (qkv, lambda q, k, v, **o: bj.bsbr_attention(q, k, v, q, k, **chunks | o)),
        "diag": (qkv, _call(bj.diag_attention, block_size=4, **causal)),
        "mlr": (qkv, _call(bj.mlr_attention, block_sizes=(None, 4), **halves, **causal)),
        "bilinear_mlr": (features, _bilinear_mlr(kv_heads)),
        "bilinear_btt": (features, _bilinear_btt),
        "global_window": (qkv, _call(bj.global_window_attention, window=2, **halves, **causal)),
        "hopfield": (qkv, _call(bj.hopfield_attention, steps=2)),
        "linformer": (qkv, _call(bj.linformer_attention, **projections)),
        "nystromformer": (qkv, _call(bj.nystromformer_attention, num_landmarks=3)),
        "kernelized": (qkv, _call(bj.kernelized_attention)),
        "synthesizer": (arrays(value), synthesizer),
        "synthesizer_dense": (
            arrays(value, tokens(20, HEADS, features=3)),
            lambda v, hidden: bj.synthesizer_attention(v, hidden, columns, columns[..., 0]),
        ),
        "flowformer": (qkv, _call(bj.flowformer_attention, **chunks)),
        "long_short": (
            arrays(query, key, value, tokens(22, kv_heads, features=2)),
            _call(bj.long_short_attention, "projection", window=3, **chunks),
        ),
        "luna": (qkv, _call(bj.luna_attention, packed=_normal(20, 3, kv_heads, head_dim), chunk_size=4)),
        "native_sparse": (qkv, _native_sparse),
        "informer": (qkv, _call(bj.informer_attention, rng=jax.random.key(0), factor=1)),
        "reformer": (qkv, reformer),
        "sinkhorn": (
            arrays(query, key, value, sort_logits),
            _call(bj.sinkhorn_attention, "sort_logits", block_size=4, **causal),
        ),
        "sliceformer": (
            arrays(value),
            lambda v, **o: bj.sliceformer_attention(v, **{"order": "interleaved"} | o),
        ),
        "skyformer": (
            qkv,
            _call(bj.skyformer_attention, samples=jnp.asarray([0.1, 0.6, 0.3, 0.9], jnp.float32)),
        ),
    }


CALLS = make_calls()
