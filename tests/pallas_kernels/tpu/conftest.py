"""Fixtures for the tests of all kernels."""

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def hostile(capfd):
    """Interpretation with the parallel steps of the grid in random order and NaN in memory that was never written. The
    test fails where two steps race."""
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=2)
    assert "RACE" not in capfd.readouterr().out
