"""Some patterns reuse another pattern's parts with a different rule: only their tests in test_patterns.py are fast."""

from pathlib import Path

import pytest

# The name in PATTERNS of cases.py, and the pattern whose parts it reuses.
REPEATS = {"surrounded": "bucketed"}


@pytest.hookimpl(tryfirst=True)  # runs before marks deselect tests
def pytest_collection_modifyitems(items):
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("name")
        if (
            name in REPEATS
            and Path(__file__).parent in item.path.parents
            and item.path.stem != "test_patterns"
        ):
            item.add_marker(pytest.mark.slow)
