"""Fixtures of the tests of attention functions."""

import pytest

from brl_jax.attention.core.by_platform import traced_for


@pytest.fixture
def all_at_once():
    """What is written for GPUs runs here."""
    with traced_for("cuda"):
        yield
