"""Functions of whole rows that devices share: the numbers of one device, and no device with whole rows of all heads."""

import functools

import numpy as np
import pytest

from tests.attention.sorting.on_a_mesh import CASES
from tests.marks import slow_unless

pytestmark = pytest.mark.xdist_group("devices")


@pytest.fixture
def result(devices):
    return functools.partial(devices.ask, "tests.attention.sorting.on_a_mesh")


@pytest.mark.parametrize("name", slow_unless(CASES, ("lsh, fewer heads than devices",)))
def test_results_and_gradients_are_those_of_one_device(result, name):
    for expected, got in zip(*result(name), strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(expected).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lsh", "informer"])
def test_stretches_are_exchanged_and_no_row_is_gathered(result, name):
    """A stretch of 1,024 tokens has 4 heads of 8 features, as many numbers as one head of the whole row."""
    found = result(f"moved {name}")
    assert {kind for kind, _ in found} == {"all-to-all"}
    assert max(elements for _, elements in found) <= 1024 * 4 * 8
