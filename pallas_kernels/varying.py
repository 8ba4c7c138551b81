"""The mesh axes over which arrays vary, for kernels inside `shard_map`."""

from __future__ import annotations

import jax
from jaxtyping import Array


def vary_alike(*arrays):
    """Returns the arrays varying over the same mesh axes, as `shard_map` requires of a kernel's operands."""
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))

    def widen(x):
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(widen(x) for x in arrays)


def result_like(operand: Array, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Declares a kernel's result, which varies over the same mesh axes as its operands."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(operand).manual_axis_type)
