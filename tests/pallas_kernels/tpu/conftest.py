"""Fixtures for the tests of all kernels."""

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def hostile(capfd):
    """Interprets kernels with the grid's parallel steps in random order and NaN in unwritten memory. The test fails if
    two steps race."""
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=2)
    assert "RACE" not in capfd.readouterr().out
