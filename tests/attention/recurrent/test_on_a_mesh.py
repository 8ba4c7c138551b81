"""Mechanisms with a state on sequences that are cut over four devices: the numbers of one, and no row travels."""

import functools

import numpy as np
import pytest

from tests.attention.recurrent.on_a_mesh import AROUND, CASES, MOVED
from tests.marks import slow_unless

pytestmark = pytest.mark.xdist_group("devices")


@pytest.fixture
def result(devices):
    return functools.partial(devices.ask, "tests.attention.recurrent.on_a_mesh")


@pytest.mark.parametrize("name", slow_unless(CASES, ("linear, packed", "gau, packed")))
def test_results_and_gradients_are_those_of_one_device(result, name):
    whole, stretches = result(name)
    for expected, got in zip(whole, stretches, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
        assert np.abs(expected).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVED)
def test_states_travel_and_no_rows(result, name):
    """Four devices have 1,024 tokens each, 16 numbers of a key; a state has 128 to 256 numbers, and 8 are gathered."""
    collectives = result(f"moved {name}")
    assert any(kind == "all-gather" for kind, _ in collectives)
    assert max(elements for _, elements in collectives) <= 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND)
def test_keys_go_around_and_no_row_is_gathered(result, name):
    """A device's 1,024 tokens have 4 heads of 16 features of keys, those of a bias included; a row has four times as
    many."""
    collectives = result(f"moved {name}")
    assert "collective-permute" in {kind for kind, _ in collectives}
    assert max(elements for _, elements in collectives) <= 1024 * 4 * 16


@pytest.mark.slow
@pytest.mark.parametrize("place", [13, 72])
def test_later_tokens_change_no_bit(result, place):
    whole, other = result(f"after {place}")
    assert (whole[:, :place] == other[:, :place]).all()
    assert not (whole[:, place:] == other[:, place:]).all()
