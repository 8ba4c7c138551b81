"""Bilinear MLR and BTT attention and split heads against dense score matrices, with gradients; the effect of rank."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.dense import full
from brl_jax.attention.structured import bilinear, feature_attention, global_window
from brl_jax.attention.structured.bilinear import btt_factors
from brl_jax.structured import BTT, MLR, BlockLowRank
from tests.oracles import attention as oracles

STATIC = ("normalize", "scale", "is_causal", "ranks", "window", "implementation")


def compiled(function):
    """As one program; uncompiled functions compile each of their operations."""
    names = inspect.signature(function).parameters
    return jax.jit(function, static_argnames=[name for name in STATIC if name in names])


bilinear_btt_attention = compiled(bilinear.bilinear_btt_attention)
bilinear_btt_keys = compiled(bilinear.bilinear_btt_keys)
bilinear_mlr_attention = compiled(bilinear.bilinear_mlr_attention)
bilinear_mlr_features = compiled(bilinear.bilinear_mlr_features)
feature_attention = compiled(feature_attention.feature_attention)
full_attention = compiled(full.full_attention)
global_window_attention = compiled(global_window.global_window_attention)

BATCH, LENGTH, WIDTH, HEADS, SIZE = 2, 37, 48, 4, 5


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


def mlr_weights(heads, width, ranks, seed):
    return [
        normal(2**level, width // 2**level, heads, rank, seed=seed) / 4 for level, rank in enumerate(ranks)
    ]


def btt_weights(heads, width, rank):
    a, b = btt_factors(width)
    return normal(a, b, heads, b, rank) / 4, normal(heads, b, a, a, rank, seed=1) / 4


def attended(scores, value, is_causal):
    """softmax(scores) value from scores (B, N, T, T), computed by the oracle."""
    length, heads = scores.shape[-1], scores.shape[1]
    zero = np.zeros((scores.shape[0], length, heads, value.shape[3]))
    visible = np.tri(length, dtype=bool) if is_causal else np.ones((1, 1), bool)
    return oracles.softmax_attention(zero, zero[:, :, : value.shape[2]], value, visible, bias=scores)[0]


@pytest.mark.parametrize("is_causal", [True, False])
def test_bilinear_mlr_is_its_structured_matrix(is_causal):
    """The scores are x_i^T M x_j with M the dense matrix of an MLR; keys and values are grouped."""
    ranks, kv_heads = (3, 2, 1), 2
    x, value = normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH, 1, SIZE)
    query, key = mlr_weights(HEADS, WIDTH, ranks, 1), mlr_weights(kv_heads, WIDTH, ranks, 2)
    out = bilinear_mlr_attention(
        x, value, query_weights=query, key_weights=key, normalize=False, scale=1.5, is_causal=is_causal
    )
    scores = []
    for head in range(HEADS):
        levels = tuple(
            BlockLowRank(1.5 / np.sqrt(q.shape[0] * q.shape[3]) * q[:, :, head], k[:, :, head // 2])
            for q, k in zip(query, key)
        )
        dense = np.asarray(MLR(levels).to_dense(), np.float64)
        scores.append(np.einsum("bti,ij,bsj->bts", x, dense, x))
    expected = attended(np.stack(scores, 1), value, is_causal)
    assert out.shape == (BATCH, LENGTH, HEADS, SIZE)
    assert oracles.relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("rank", [1, 2])
def test_bilinear_btt_is_its_structured_matrix(rank):
    """The scores are x_i^T M x_j with M the dense matrix of a BTT."""
    x, value = normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH, 2, SIZE)
    right, left = btt_weights(HEADS, WIDTH, rank)
    out = bilinear_btt_attention(x, value, right=right, left=left, normalize=False, is_causal=True)
    matrices = [BTT(left[head], right[:, :, head]) for head in range(HEADS)]
    dense = np.stack([np.asarray(m.to_dense(), np.float64) for m in matrices])
    scores = np.einsum("bti,nij,bsj->bnts", x, dense, x) / np.sqrt(WIDTH)
    assert oracles.relative_error(out, attended(scores, value, True)) < 1e-4
    keys = bilinear_btt_keys(x, right, left, normalize=False)
    for head, matrix in enumerate(matrices):
        np.testing.assert_allclose(keys[:, :, head], matrix.matmul(x), rtol=1e-4, atol=1e-4)
        assert matrix.rank == WIDTH == np.linalg.matrix_rank(dense[head])


def test_layer_norms():
    """Normalizes each head's and level's features, or the whole width; heads share the scales."""
    x, ranks = normal(BATCH, LENGTH, WIDTH), (3, 2)
    weights, scales = mlr_weights(HEADS, WIDTH, ranks, 1), [normal(3), normal(4)]

    def layer_norm(y, scale):
        y = np.asarray(y, np.float64)
        y = y - y.mean(-1, keepdims=True)
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale)

    bare = bilinear_mlr_features(x, weights, normalize=False)
    got = bilinear_mlr_features(x, weights, norm_scales=scales)
    expected = [layer_norm(bare[..., :3], scales[0]), layer_norm(bare[..., 3:], scales[1])]
    assert oracles.relative_error(got, np.concatenate(expected, -1)) < 1e-5
    right, left = btt_weights(HEADS, WIDTH, 1)
    bare = bilinear_btt_keys(x, right, left, normalize=False)
    got = bilinear_btt_keys(x, right, left, norm_scale=normal(WIDTH))
    assert oracles.relative_error(got, layer_norm(bare, normal(WIDTH))) < 1e-5


def test_feature_attention_is_full_attention():
    """On either path: one MLR level, and blocks of queries at an offset."""
    query, key, value = normal(1, 300, 4, 6), normal(1, 300, 4, 6), normal(1, 300, 2, 3)
    wide = jnp.repeat(value, 2, axis=2)
    expected = full_attention(query, key, wide, scale=1.0, is_causal=True)
    whole = feature_attention(query, key, value, is_causal=True)
    assert oracles.relative_error(whole, expected) < 1e-5
    late = feature_attention(query[:, 20:], key, value, is_causal=True, query_offset=jnp.int32(20))
    assert oracles.relative_error(late, expected[:, 20:]) < 1e-5


@pytest.mark.parametrize("form", ["mlr", "btt"])
def test_padding_reaches_no_gradient_of_a_weight(form):
    x, value, lengths = (
        normal(BATCH, LENGTH, WIDTH),
        normal(BATCH, LENGTH, 1, SIZE),
        jnp.asarray([LENGTH, 20]),
    )
    inside = (jnp.arange(LENGTH)[None] < lengths[:, None])[..., None]
    options = {"is_causal": True, "query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    if form == "mlr":
        names = "query_weights", "key_weights"
        weights = [mlr_weights(HEADS, WIDTH, (3, 2), seed) for seed in (1, 2)]
    else:
        names, weights = ("right", "left"), btt_weights(HEADS, WIDTH, 1)
    attend = bilinear_mlr_attention if form == "mlr" else bilinear_btt_attention

    def gradient(padding):
        padded = jnp.where(inside, x, padding)
        return jax.grad(lambda weights: attend(padded, value, **dict(zip(names, weights)), **options).sum())(
            weights
        )

    for got, expected in zip(*(jax.tree.leaves(gradient(padding)) for padding in (jnp.nan, 5.0))):
        np.testing.assert_array_equal(got, expected)


# --- The low-rank bottleneck: arXiv:2509.07963, section 2.2 ---


def test_eight_bilinear_heads_score_by_the_identity_and_eight_standard_heads_cannot():
    """x -> x_i . x_j at width 64: with 8 heads, each bilinear form computes it exactly in every head. The scores of a
    standard head have rank at most 8, so on 64 orthonormal tokens they are at least sqrt(64 - 8) away."""
    width, heads = 64, 8
    x = jnp.eye(width)[None]
    identity = np.eye(width)
    eye = jnp.eye(8)
    right = jnp.broadcast_to(eye[None, :, None, :, None], (8, 8, heads, 8, 1))  # (c, e, N, b, t)
    left = jnp.broadcast_to(eye[None, None, :, :, None], (heads, 8, 8, 8, 1))  # (N, b, a, c, t)
    keys = bilinear_btt_keys(x, right, left, normalize=False)
    btt = np.einsum("td,snd->nts", x[0], keys[0])
    # Ranks that sum to the head_dim 8, as in standard attention; the last level has 32 full blocks of 2 channels.
    ranks = (1, 1, 1, 1, 2, 2)
    weights = [jnp.zeros((2**level, width // 2**level, heads, rank)) for level, rank in enumerate(ranks)]
    weights[-1] = jnp.broadcast_to(jnp.eye(2)[None, :, None], weights[-1].shape)
    features = bilinear_mlr_features(x, weights, normalize=False)[0]
    mlr = np.einsum("tnf,snf->nts", features, features)
    for scores in (btt, mlr):
        np.testing.assert_array_equal(scores, np.broadcast_to(identity, scores.shape))

    query, key = normal(width, heads, 8), normal(width, heads, 8, seed=1)
    standard = np.einsum("tnh,snh->nts", query, key)
    for scores in standard:
        # The nearest multiple of this head's scores, then the bound for any head.
        best = scores * (scores * identity).sum() / (scores**2).sum()
        assert np.linalg.matrix_rank(scores) == 8
        assert np.linalg.norm(identity - best) > np.sqrt(width - 8)
    u, s, v = np.linalg.svd(identity)
    nearest = (u[:, :8] * s[:8]) @ v[:8]
    assert np.linalg.norm(identity - nearest) == pytest.approx(np.sqrt(width - 8))


# --- Factors and bad input ---


def test_btt_factors():
    assert [btt_factors(n) for n in (48, 64, 16, 6, 1024)] == [(6, 8), (8, 8), (4, 4), (2, 3), (32, 32)]
    with pytest.raises(
        ValueError, match=r"got 23 = 1\*23; the nearest such widths are 21 = 3\*7 and 24 = 4\*6"
    ):
        btt_factors(23)
    with pytest.raises(ValueError, match=r"got 2 = 1\*2; the nearest such widths are 4 = 2\*2"):
        btt_factors(2)


def test_tokens_are_multiplied_in_the_order_that_costs_least():
    """Appendix D of arXiv:2509.07963, tables 2 and 3, for a head of width 64: of all orders, a level of MLR multiplies
    queries and keys by their factors first (eq. 32), and a BTT of rank 2 one side by both cores, and then the tokens of
    the other side (eq. 35)."""

    def order(products, *shapes):
        arrays = [np.empty(shape) for shape in shapes]
        _, steps = np.einsum_path(products, *arrays, optimize="optimal", einsum_call=True)
        return [set(step[1].split("->")[0].split(",")) for step in steps]

    tokens, blocks = (256, 4, 16), (4, 16, 4)
    mlr = order("ipd,pdr,per,jpe->ij", tokens, blocks, blocks, tokens)
    assert {"pdr", "ipd"} in mlr
    assert {"per", "jpe"} in mlr
    btt = order("iab,bact,cebt,jce->ij", (256, 8, 8), (8, 8, 8, 2), (8, 8, 8, 2), (256, 8, 8))
    assert btt[-1] & {"iab", "jce"}
    assert {"bact", "cebt"} <= btt[0] | btt[1]
