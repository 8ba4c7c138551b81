"""Loops under `jax.shard_map`."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import lax

T = TypeVar("T")


def vary_like(tree: T, others: Any, *, but: str | None = None) -> T:
    """The arrays of a pytree, as arrays that vary over the mesh axes that any array of `others` varies over.

    Under `shard_map` the carry of a loop must have one type from start to end: an initial value of zeros does not vary
    over the mesh axes that the sums in it come to vary over.

    Args:
      but: an axis that is left as it is.
    """
    axes: frozenset[Any] = frozenset()
    for x in jax.tree.leaves(others):
        if isinstance(x, jax.Array):
            axes |= jax.typeof(x).manual_axis_type.varying
    axes -= {but}

    def widen(x: Any) -> Any:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(widen, tree) if axes else tree
