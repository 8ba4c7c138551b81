"""Fixtures for tests of attention functions."""

import pytest

from brl_jax.attention.core.by_platform import traced_for


@pytest.fixture
def all_at_once():
    """Runs the form for GPUs on this machine."""
    with traced_for("cuda"):
        yield


@pytest.fixture
def platform(request):
    """Runs the form for this platform on this machine."""
    with traced_for(request.param):
        yield request.param


@pytest.fixture
def schedule(request):
    """Runs both schedules on this machine: the CPU's ("loop"), and the one for other platforms."""
    with traced_for("cpu" if request.param == "loop" else "default"):
        yield request.param
