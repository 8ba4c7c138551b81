"""The matrix products of a traced function. Loops and kernels count as often as they run, which the compiler's own
analysis does not consider."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from brl_jax.attention.core.by_platform import platform_jaxpr


def matrix_flops(jaxpr: Any, platform: str = "tpu") -> float:
    """Floating-point operations of all matrix products in a traced function, two for each multiplied pair.

    Loops are multiplied by their length, kernels by their grid, and the work of each device under `shard_map` by the
    number of devices; of several branches, the one of the platform counts, or the most expensive one. Work that the
    backward pass repeats counts twice.
    """
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    chosen: dict[Any, int] = {}  # the branch that the platform takes, by the variable with its index
    total = 0.0
    for equation in inner.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product_flops(equation)
        elif name == "platform_index":
            kinds = [kind is None or platform in kind for kind in params["platforms"]]
            chosen[equation.outvars[0]] = kinds.index(True)
        elif name == "cond":
            branches = params["branches"]
            index = equation.invars[0]
            at = chosen.get(index) if isinstance(index, core.Var) else None
            total += max(
                matrix_flops(branch, platform)
                for branch in (branches if at is None else branches[at : at + 1])
            )
        elif (form := platform_jaxpr(equation, platform)) is not None:
            total += matrix_flops(form, platform)
        else:
            total += _times(name, params) * sum(
                matrix_flops(part, platform) for part in inner_programs(params)
            )
    return total


def _product_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _times(name: str, params: dict[str, Any]) -> int:
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape.values())
    return math.prod(params["grid_mapping"].grid) if name == "pallas_call" else 1


def inner_programs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    """The jaxprs inside an equation, from its parameters."""
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                yield part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
