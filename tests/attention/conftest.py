"""Fixtures of the tests of attention functions."""

import pytest
from jax import lax

from brl_jax.attention.local import api as local


@pytest.fixture
def all_at_once(monkeypatch):
    """What is written for GPUs runs here."""

    def take_cuda(*operands, default=None, **branches):
        return branches.get("cuda", default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", take_cuda)


@pytest.fixture
def schedule(request, monkeypatch):
    """Both schedules run here: the CPU's, and the one that other platforms lower to."""
    if request.param == "loop":
        yield request.param
        return
    taken = []

    def take_default(*args, default, **others):
        taken.append(default)
        return default(*args)

    local._choose.clear_cache()
    monkeypatch.setattr(lax, "platform_dependent", take_default)
    yield request.param
    assert taken
    local._choose.clear_cache()
