"""Full attention on queries that are cut over four devices: the numbers of one device."""

import numpy as np
import pytest

pytestmark = [pytest.mark.xdist_group("devices"), pytest.mark.slow]


@pytest.mark.parametrize("name", ["causal", "both ways, sinks", "hopfield"])
def test_results_and_gradients_are_those_of_one_device(devices, name):
    whole, cut = devices.ask("tests.attention.dense.on_a_mesh", name)
    for expected, got in zip(whole, cut, strict=True):
        assert np.isfinite(got).all()
        assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()
        assert np.abs(expected).max() > 0.01
