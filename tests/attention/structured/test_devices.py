"""Structured scores on rows shared by four of eight devices: one device's numbers, and no device holds a whole row."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import bilinear_btt_attention, bilinear_mlr_attention, global_window_attention, mlr_attention
from brl_jax.attention.dense.attend import MANY_TOKENS
from brl_jax.attention.structured.feature_attention import feature_attention
from tests.marks import slow_unless
from tests.support.attention import random_qkv
from tests.support.meshes import after, check_equal, check_prefix, compared, draw, moved

pytestmark = pytest.mark.xdist_group("devices")
LENGTH, WIDTH = MANY_TOKENS, 16


def featured():
    """A query (4 heads), key (2) and value (1) with different feature sizes."""
    return [0.5 * draw(2, LENGTH, *size, seed=seed) for seed, size in enumerate(((4, 12), (2, 12), (1, 6)))]


def packed():
    """Segments that end inside a device's tokens, at a device's last token, or several devices later."""
    ids = np.zeros((2, LENGTH), np.int32)
    ids[0, LENGTH // 4 :] = 1
    ids[1, 100:], ids[1, 700:] = 3, 4
    return jnp.asarray(ids)


FEATURES = {
    "causal": {"is_causal": True},
    "causal, packed": {"is_causal": True, "segment_ids": packed()},
    "both ways, padded": {
        "query_seq_lengths": jnp.array([LENGTH - 9, LENGTH]),
        "key_value_seq_lengths": jnp.array([LENGTH, 300]),
    },
}
# Four devices have parts of 4 tokens of a causal row of 32, and of 8 tokens of another. A block spans several parts,
# one part, or less.
MLR = {
    "causal": {"ranks": (2, 2, 1, 2, 1), "block_sizes": (None, 16, 8, 4, 2), "is_causal": True},
    "causal, no common block": {
        "ranks": (4, 2, 2), "block_sizes": (16, 8, 2), "is_causal": True,
    },
    "both ways, padded": {
        "ranks": (3, 3, 2), "block_sizes": (None, 16, 4), "key_value_seq_lengths": jnp.array([0, 19]),
        "query_seq_lengths": jnp.array([32, 30]),
    },
    "parts that blocks do not fit": {"ranks": (4, 4), "block_sizes": (None, 6), "is_causal": True},
}  # fmt: skip


def level_scores(x, value):
    query = x.reshape(*x.shape[:2], 4, 4)
    return mlr_attention(query, query[:, :, :2], value, ranks=(2, 1, 1), is_causal=True)


def bilinear_mlr(x, value):
    weights = [draw(blocks, WIDTH // blocks, 4, rank, seed=rank) / 4 for blocks, rank in ((1, 5), (2, 3))]
    return bilinear_mlr_attention(x, value, query_weights=weights, key_weights=weights, is_causal=True)


def bilinear_btt(x, value):
    right, left = draw(4, 4, 4, 4, 1, seed=5) / 2, draw(4, 4, 4, 4, 1, seed=6) / 2
    return bilinear_btt_attention(x, value, right=right, left=left, is_causal=True)


def global_window(x, value):
    query = x.reshape(*x.shape[:2], 4, 4)
    return global_window_attention(query, query[:, :, :2], value, ranks=(3, 1), window=9, is_causal=True)


FUNCTIONS = {
    "mlr": level_scores, "bilinear_mlr": bilinear_mlr, "bilinear_btt": bilinear_btt, "global_window": global_window,
}  # fmt: skip


def operands():
    return draw(2, LENGTH, WIDTH, seed=8), draw(2, LENGTH, 2, 4, seed=9)


def features(options):
    return functools.partial(feature_attention, **options)


def mlr(options):
    return functools.partial(mlr_attention, **options)


PARTS = {f"features, {name}": lambda o=o: compared(features(o), *featured()) for name, o in FEATURES.items()}
PARTS |= {f"mlr, {name}": lambda o=o: compared(mlr(o), *random_qkv(32)[:3]) for name, o in MLR.items()}
PARTS["features after"] = lambda: after(features(FEATURES["causal"]), 500, featured())
PARTS["mlr after"] = lambda: after(mlr(MLR["causal"]), 21, random_qkv(32)[:3])
PARTS |= {f"moved {name}": lambda f=f: moved(f, *operands(), length=LENGTH) for name, f in FUNCTIONS.items()}


CASES = [*(f"features, {name}" for name in FEATURES), *(f"mlr, {name}" for name in MLR)]


@pytest.mark.parametrize("name", slow_unless(CASES, ("features, causal", "mlr, causal")))
def test_results_and_gradients_equal_one_devices(result, name):
    check_equal(*result(name), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place"), [("features after", 500), ("mlr after", 21)])
def test_later_tokens_change_no_bit(result, case, place):
    check_prefix(*result(case), place)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_row_is_gathered(result, name):
    """A device has 1,024 of a row's 4,096 tokens. Bilinear scores have keys with more features than x."""
    found = result(f"moved {name}")
    assert {kind for kind, _ in found} == {"collective-permute"}
    features = {"bilinear_mlr": 4 * (5 + 2 * 3), "bilinear_btt": 4 * WIDTH}
    assert max(elements for _, elements in found) <= 1024 * features.get(name, WIDTH)
