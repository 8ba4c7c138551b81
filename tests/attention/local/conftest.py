"""Patterns that run the parts of another pattern with another rule: only their tests in test_patterns.py are fast."""

from pathlib import Path

import pytest

# The name in PATTERNS of test_local.py, and the pattern whose parts it has.
REPEATS = {"surrounded": "bucketed"}


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if (
            name in REPEATS
            and Path(__file__).parent in item.path.parents
            and item.path.stem != "test_patterns"
        ):
            item.add_marker(pytest.mark.slow)
