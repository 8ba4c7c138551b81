"""What loops may carry: arrays that vary alike under `jax.shard_map`, and gradients of floating-point arrays."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


def vary_like(tree: T, others: Any, *, but: str | None = None) -> T:
    """Makes the arrays of a pytree vary over every mesh axis that an array of `others` varies over, except `but`.

    Under `shard_map` a loop's carry must keep its type. Zeros vary over no mesh axis, but the sums that replace them
    do.
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


def of_floats(tree: T) -> T:
    """The tree, with None for the leaves that are not floating point, such as the gradients of integers."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree)
