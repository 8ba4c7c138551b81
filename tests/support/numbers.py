"""Comparisons of numbers with float64 references."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def as_float64(tree: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def relative_error(actual: Any, expected: Any) -> float:
    """Norm of the difference over the norm of the expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-30))
