"""Fixtures of the tests of attention functions."""

import pytest

from brl_jax.attention.core.by_platform import traced_for


@pytest.fixture
def all_at_once():
    """What is written for GPUs runs here."""
    with traced_for("cuda"):
        yield


@pytest.fixture
def schedule(request):
    """Both schedules run here: the CPU's ("loop"), and the one that other platforms lower to."""
    with traced_for("cpu" if request.param == "loop" else "default"):
        yield request.param
