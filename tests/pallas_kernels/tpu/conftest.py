"""What the tests of all kernels share."""

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def hostile(capfd):
    """Interpretation with the grid's parallel steps shuffled and NaN in all memory that nothing wrote; the test fails
    where two steps race."""
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=2)
    assert "RACE" not in capfd.readouterr().out
