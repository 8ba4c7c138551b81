"""A small call of every public attention function, as a function of arrays whose first axis is the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import brl_jax as bj

LENGTH, HEADS, KV_HEADS, HEAD_DIM, COMPRESSED, WIDTH = 9, 4, 2, 4, 3, 8


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def qkv(batch, kv_heads=KV_HEADS):
    return (
        _normal(1, batch, LENGTH, HEADS, HEAD_DIM),
        _normal(2, batch, LENGTH, kv_heads, HEAD_DIM),
        _normal(3, batch, LENGTH, kv_heads, HEAD_DIM),
    )


def _history(batch):
    few, other = _normal(4, batch, COMPRESSED, HEADS, HEAD_DIM), _normal(5, batch, LENGTH, HEADS, HEAD_DIM)
    query, key, value = qkv(batch, HEADS)
    return query, key, value, few, other


def _compress(query, key, value, few, other):
    return bj.compress(few, key, other, value, gamma=0.3)


def _compress_blocks(query, key, value, few, other):
    blocks = jnp.stack([few] * 3, 1)
    return bj.compress_blocks(blocks, key, other, value, gamma=0.3, block_size=3, history_size=3)


def _propagate(query, key, value, few, other):
    return bj.propagate(query, few, few, strength=0.5)


def _tokens(batch):
    return _normal(6, batch, LENGTH, WIDTH), _normal(7, batch, LENGTH, KV_HEADS, HEAD_DIM)


def _bilinear_mlr(x, value):
    # Each level is normalized over its features: with two of them, rounding decides the gradient's fourth digit.
    weights = [_normal(8, 1, WIDTH, HEADS, 4), _normal(9, 2, WIDTH // 2, HEADS, 4)]
    keys = [_normal(10, 1, WIDTH, KV_HEADS, 4), _normal(11, 2, WIDTH // 2, KV_HEADS, 4)]
    return bj.bilinear_mlr_attention(x, value, query_weights=weights, key_weights=keys, is_causal=True)


def _bilinear_btt(x, value):
    right, left = _normal(12, 2, 4, HEADS, 2, 2), _normal(13, HEADS, 2, 4, 2, 2)
    return bj.bilinear_btt_attention(x, value, right=right, left=left, is_causal=True)


_PACKED = _normal(20, 3, KV_HEADS, HEAD_DIM)


def _native_sparse(query, key, value):
    sizes = bj.BlockSizes(compressed=2, stride=1, selected=2, blocks=4)
    blocks = (bj.compression_blocks(x, sizes).mean(2) for x in (key, value))
    return bj.native_sparse_attention(query, key, value, *blocks, query[..., :3], sizes=sizes, window=3)


def _with_beta(batch):
    return *qkv(batch), jax.nn.sigmoid(_normal(14, batch, LENGTH, KV_HEADS))


def _linear_decayed(q, k, v, beta):
    log_decay = -3 * beta[..., None] * jax.nn.sigmoid(k)
    return bj.linear_attention(
        q, k, v, log_decay=log_decay, normalize=False, feature_map="elu", is_causal=True, chunk_size=4
    )


def _mixed(q, k, v):
    return bj.mixed_chunk_attention(q, k, q, k, v, is_causal=True, chunk_size=4)


def _bsbr(q, k, v):
    return bj.bsbr_attention(q, k, v, q, k, is_causal=True, chunk_size=4)


def _linformer(q, k, v):
    projections = _normal(15, 3, LENGTH), _normal(16, 3, LENGTH)
    return bj.linformer_attention(q, k, v, key_projection=projections[0], value_projection=projections[1])


def _with_sort_logits(batch):
    return *qkv(batch), _normal(18, batch, 3, KV_HEADS, 3)


def _with_hidden(batch):
    return *qkv(batch)[2:], _normal(20, batch, LENGTH, HEADS, 3)


_COLUMNS = _normal(21, 12, HEADS, 3)
_ROTATIONS = _normal(19, 2, HEAD_DIM, 2)
_SAMPLES = jnp.asarray([0.1, 0.6, 0.3, 0.9], jnp.float32)

#: name -> (function from a batch size to its arrays, the call)
CALLS = {
    "full": (qkv, lambda q, k, v: bj.full_attention(q, k, v, is_causal=True)),
    "local": (qkv, lambda q, k, v: bj.local_attention(q, k, v, local_window_size=(2, 0))),
    "local_both_sides": (qkv, lambda q, k, v: bj.local_attention(q, k, v, local_window_size=(2, 1))),
    "local_strided": (
        qkv,
        lambda q, k, v: bj.local_attention(q, k, v, pattern=bj.Strided(3), is_causal=True),
    ),
    "local_alibi": (
        qkv,
        lambda q, k, v: bj.local_attention(
            q, k, v, local_window_size=2, bias=bj.ALiBi(bj.alibi_slopes(HEADS))
        ),
    ),
    "compress": (_history, _compress),
    "compress_blocks": (_history, _compress_blocks),
    "propagate": (_history, _propagate),
    "linear": (qkv, lambda q, k, v: bj.linear_attention(q, k, v, is_causal=True, chunk_size=4)),
    "linear_decayed": (_with_beta, _linear_decayed),
    "norm": (qkv, lambda q, k, v: bj.norm_attention(q, k, v, is_causal=True, chunk_size=4)),
    "performer": (
        qkv,
        lambda q, k, v: bj.performer_attention(
            q, k, v, projection=_normal(17, 8, HEAD_DIM), is_causal=True, chunk_size=4
        ),
    ),
    "cosformer": (
        qkv,
        lambda q, k, v: bj.cosformer_attention(q, k, v, max_length=16, is_causal=True, chunk_size=4),
    ),
    "delta": (_with_beta, lambda q, k, v, beta: bj.delta_rule(q, k, v, beta=beta, chunk_size=4)),
    "gated_delta": (
        _with_beta,
        lambda q, k, v, beta: bj.gated_delta_rule(
            q, k, v, beta=beta, log_decay=-3 * beta[..., ::-1], chunk_size=4
        ),
    ),
    "kimi_delta": (
        _with_beta,
        lambda q, k, v, beta: bj.kimi_delta_rule(
            q,
            k,
            v,
            beta=beta,
            log_decay=-3 * beta[..., ::-1, None] * jnp.arange(4.0).reshape(1, 1, 1, 4),
            chunk_size=4,
        ),
    ),
    "gated_delta_2": (
        _with_beta,
        lambda q, k, v, beta: bj.gated_delta_rule_2(
            q,
            k,
            v,
            erase=jax.nn.sigmoid(k[..., ::-1]),
            write=beta[..., None] * jnp.cos(v),
            log_decay=-3 * jax.nn.sigmoid(k),
            chunk_size=4,
        ),
    ),
    "rwkv7": (
        _with_beta,
        lambda q, k, v, beta: bj.rwkv7_attention(
            q,
            k,
            v,
            removal_key=k[..., ::-1],
            learning_rate=beta[..., None] * jnp.arange(4.0).reshape(1, 1, 1, 4) / 4,
            log_decay=-3 * jax.nn.sigmoid(k),
            chunk_size=4,
        ),
    ),
    "gau": (qkv, lambda q, k, v: bj.gau_attention(q, k, v, is_causal=True, chunk_size=4)),
    "mixed_chunk": (qkv, _mixed),
    "bsbr": (qkv, _bsbr),
    "diag": (qkv, lambda q, k, v: bj.diag_attention(q, k, v, block_size=4, is_causal=True)),
    "mlr": (
        qkv,
        lambda q, k, v: bj.mlr_attention(q, k, v, ranks=(2, 2), block_sizes=(None, 4), is_causal=True),
    ),
    "bilinear_mlr": (_tokens, _bilinear_mlr),
    "bilinear_btt": (_tokens, _bilinear_btt),
    "global_window": (
        qkv,
        lambda q, k, v: bj.global_window_attention(q, k, v, ranks=(2, 2), window=2, is_causal=True),
    ),
    "hopfield": (qkv, lambda q, k, v: bj.hopfield_attention(q, k, v, steps=2)),
    "linformer": (qkv, _linformer),
    "nystromformer": (qkv, lambda q, k, v: bj.nystromformer_attention(q, k, v, num_landmarks=3)),
    "kernelized": (qkv, bj.kernelized_attention),
    "synthesizer": (
        lambda batch: qkv(batch)[2:],
        lambda v: bj.synthesizer_attention(v, _COLUMNS[:LENGTH], _COLUMNS, is_causal=True),
    ),
    "synthesizer_dense": (
        _with_hidden,
        lambda v, hidden: bj.synthesizer_attention(v, hidden, _COLUMNS, _COLUMNS[..., 0]),
    ),
    "flowformer": (qkv, lambda q, k, v: bj.flowformer_attention(q, k, v, is_causal=True, chunk_size=4)),
    "long_short": (
        qkv,
        lambda q, k, v: bj.long_short_attention(q, k, v, k[..., :2], window=3, chunk_size=4, is_causal=True),
    ),
    "luna": (qkv, lambda q, k, v: bj.luna_attention(q, k, v, _PACKED, chunk_size=4)),
    "native_sparse": (qkv, _native_sparse),
    "informer": (qkv, lambda q, k, v: bj.informer_attention(q, k, v, rng=jax.random.key(0), factor=1)),
    "reformer": (qkv, lambda q, k, v: bj.reformer_attention(q, v, _ROTATIONS, chunk_size=2, is_causal=True)),
    "sinkhorn": (_with_sort_logits, lambda *a: bj.sinkhorn_attention(*a, block_size=4, is_causal=True)),
    "sliceformer": (lambda batch: qkv(batch)[2:], lambda v: bj.sliceformer_attention(v, order="interleaved")),
    "skyformer": (qkv, lambda q, k, v: bj.skyformer_attention(q, k, v, samples=_SAMPLES)),
}
