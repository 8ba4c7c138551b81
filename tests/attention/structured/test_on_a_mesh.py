"""Structured scores on rows that devices share: an oracle's numbers, and no device with a whole row."""

import functools

import numpy as np
import pytest

from tests.attention.structured import on_a_mesh as cases
from tests.attention.structured.test_mlr import oracle
from tests.marks import slow_unless
from tests.oracles.attention import softmax_attention, softmax_attention_gradients
from tests.support.attention import random_qkv

pytestmark = pytest.mark.xdist_group("devices")


@pytest.fixture
def result(devices):
    return functools.partial(devices.ask, "tests.attention.structured.on_a_mesh")


@pytest.mark.parametrize("name", slow_unless(cases.FEATURES, ("causal",)))
def test_features_give_the_oracles_numbers_and_gradients(result, name):
    query, key, value, d_out = (np.asarray(x, np.float64) for x in cases.featured(cases.LENGTH))
    options = cases.FEATURES[name]
    places = np.arange(cases.LENGTH)
    visible = np.ones((2, 1, cases.LENGTH, cases.LENGTH), bool)
    if options.get("is_causal"):
        visible &= places[:, None] >= places
    if "segment_ids" in options:
        ids = np.asarray(options["segment_ids"])
        visible &= (ids[:, :, None] == ids[:, None])[:, None]
    if "key_value_seq_lengths" in options:
        visible &= (places < np.asarray(options["key_value_seq_lengths"])[:, None])[:, None, None]
        exists = (places < np.asarray(options["query_seq_lengths"])[:, None])[:, :, None, None]
        visible, d_out = visible & exists[:, None, :, 0], d_out * exists
    wide = np.repeat(value, 2, axis=2)
    out, _ = softmax_attention(query, key, wide, visible, scale=1.0)
    d_query, d_key, d_wide, _ = softmax_attention_gradients(query, key, wide, visible, d_out, scale=1.0)
    expected = [out, d_query, d_key, d_wide.sum(2, keepdims=True)]
    for got, wanted in zip(result(f"features, {name}"), expected, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(wanted).max() > 0.01
        assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", slow_unless(cases.MLR, ("causal",)))
def test_levels_give_the_oracles_numbers_and_gradients(result, name):
    options = cases.MLR[name]
    *arrays, d_out = map(np.asarray, random_qkv(32))
    places = np.arange(32)
    visible = np.ones((2, 1, 32, 32), bool)
    if options.get("is_causal"):
        visible &= places[:, None] >= places
    if "key_value_seq_lengths" in options:
        visible &= (places < np.asarray(options["key_value_seq_lengths"])[:, None])[:, None, None]
        exists = (places < np.asarray(options["query_seq_lengths"])[:, None])[:, :, None, None]
        visible, d_out = visible & exists[:, None, :, 0], d_out * exists
    divide = options.get("divide_by_levels", False)
    expected = oracle([*arrays, d_out], options["ranks"], options["block_sizes"], visible, divide)
    for got, wanted in zip(result(f"mlr, {name}"), expected, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(wanted).max() > 0.01
        assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place"), [("after", 500), ("mlr after", 21)])
def test_later_tokens_change_no_bit(result, case, place):
    whole, other = result(case)
    assert (whole[:, :place] == other[:, :place]).all()
    assert not (whole[:, place:] == other[:, place:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.FUNCTIONS)
def test_results_and_gradients_are_those_of_one_device(result, name):
    for expected, got in zip(*result(name), strict=True):
        assert np.isfinite(got).all()
        assert np.abs(expected).max() > 0.01
        assert np.abs(got - expected).max() <= 3e-5 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.FUNCTIONS)
def test_no_row_is_gathered(result, name):
    """A device has 1,024 of a row's 4,096 tokens. Keys have more features than x where scores are bilinear."""
    found = result(f"moved {name}")
    assert {kind for kind, _ in found} == {"collective-permute"}
    features = {"bilinear_mlr": 4 * (5 + 2 * 3), "bilinear_btt": 4 * cases.WIDTH}
    assert max(elements for _, elements in found) <= 1024 * features.get(name, cases.WIDTH)
