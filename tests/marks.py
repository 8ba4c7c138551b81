"""Which of a test's parameters are fast and which only run before a release."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The values, marked slow unless they, or a tuple's first item, are among the fast ones."""
    marked = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        marks = () if value in fast or arguments[0] in fast else pytest.mark.slow
        marked.append(pytest.param(*arguments, marks=marks))
    return marked
