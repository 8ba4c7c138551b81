"""Fixtures of the tests of attention functions."""

import pytest

from brl_jax.attention.core.by_platform import traced_for
from brl_jax.attention.local import api as local


@pytest.fixture
def all_at_once():
    """What is written for GPUs runs here."""
    with traced_for("cuda"):
        yield


@pytest.fixture
def schedule(request, monkeypatch):
    """Both schedules run here: the CPU's, and the one that other platforms lower to."""
    if request.param == "loop":
        yield request.param
        return
    taken = []

    def forms(call):
        taken.append(call)
        return {"default": of_platforms(call)["default"]}

    of_platforms = local.xla.forms
    local._choose.clear_cache()
    monkeypatch.setattr(local.xla, "forms", forms)
    yield request.param
    assert taken
    local._choose.clear_cache()
