"""Counts the multiplications of a traced function, some of whose arguments are known. Loops and branches that depend on
these count as they would run, and results that nothing reads do not count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from brl_jax.attention.core.by_platform import platform_jaxpr

# Values are followed in arrays of at most this many entries.
_FOLLOWED = 4096


class Unknown(Exception):
    """A loop or a branch depends on a value that is not known."""


def products(function: Any, *arguments: Any) -> float:
    """Multiplications in the matrix products of function(*arguments).

    Arguments are pytrees of arrays and `jax.ShapeDtypeStruct`. The values of arrays with at most 4096 entries count as
    known, all others as unknown.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    values = [_known(leaf) for leaf in jax.tree.leaves(arguments)]
    return _Count(0.0).run(traced.jaxpr, list(map(_known, traced.consts)), values).total


def _known(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct) or np.size(value) > _FOLLOWED:
        return None
    return None if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else np.asarray(value)


def _used(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr that its outputs depend on."""
    needed = {atom for atom in jaxpr.outvars if not isinstance(atom, core.Literal)}
    used = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or needed.intersection(equation.outvars):
            used.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
    return used[::-1]


class _Count:
    def __init__(self, total: float) -> None:
        self.total = total
        self.results: Sequence[Any] = ()

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> _Count:
        """Adds the products of a jaxpr with these argument values (None if unknown); sets `results`."""
        known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values)))

        def read(atom: Any) -> Any:
            return _known(np.asarray(atom.val)) if isinstance(atom, core.Literal) else known[atom]

        for equation in _used(jaxpr):
            out = self._equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, out))
        self.results = [read(atom) for atom in jaxpr.outvars]
        return self

    def _inner(self, closed: Any, values: Sequence[Any]) -> Sequence[Any]:
        jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
        consts = [_known(c) for c in getattr(closed, "consts", ())]
        return self.run(jaxpr, consts, values).results

    def _equation(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        nothing = [None] * len(equation.outvars)
        match name:
            case "dot_general":
                (contracted, _), _ = params["dimension_numbers"]
                left = equation.invars[0].aval.shape
                self.total += math.prod(equation.outvars[0].aval.shape) * math.prod(
                    left[axis] for axis in contracted
                )
                return nothing
            case "platform_index":
                kinds = [kind is None or "cpu" in kind for kind in params["platforms"]]
                return [np.asarray(kinds.index(True), np.int32)]
            case "cond":
                if values[0] is None:
                    raise Unknown("the index of a branch is not known")
                return self._inner(params["branches"][int(values[0])], values[1:])
            case "while":
                return self._while(params, values)
            case "scan":
                return self._scan(equation, values)
        form = platform_jaxpr(equation, "cpu")
        if form is not None:
            return self._inner(form, values)
        part = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if part is not None:
            return self._inner(part, values)
        if all(value is not None for value in values) and all(
            math.prod(out.aval.shape) <= _FOLLOWED for out in equation.outvars
        ):
            with jax.ensure_compile_time_eval():
                out = equation.primitive.bind(*values, **params)
            return [_known(x) for x in (out if equation.primitive.multiple_results else [out])]
        return nothing

    def _while(self, params: Any, values: list[Any]) -> Sequence[Any]:
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        before = values[:of_condition]
        consts, carry = values[of_condition : of_condition + of_body], values[of_condition + of_body :]
        while True:
            (again,) = self._inner(params["cond_jaxpr"], [*before, *carry])
            if again is None:
                raise Unknown("the end of a loop is not known")
            if not again:
                return carry
            carry = list(self._inner(params["body_jaxpr"], [*consts, *carry]))

    def _scan(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        params = equation.params
        # The parameters that count constants and carries differ between versions of JAX. Arrays of rows have one more
        # axis outside than inside.
        body = params["jaxpr"].jaxpr
        of_rows = sum(x.aval.ndim > inner.aval.ndim for x, inner in zip(equation.invars, body.invars))
        of_carry = sum(x.aval.ndim == inner.aval.ndim for x, inner in zip(equation.outvars, body.outvars))
        of_consts = len(values) - of_rows - of_carry
        consts, carry, rows = (
            values[:of_consts], values[of_consts : of_consts + of_carry], values[of_consts + of_carry :]
        )  # fmt: skip
        order = range(params["length"])
        made = 0
        for i in reversed(order) if params["reverse"] else order:
            row = [None if x is None else x[i] for x in rows]
            out = self._inner(params["jaxpr"], [*consts, *carry, *row])
            carry, made = list(out[:of_carry]), len(out) - of_carry
        return [*carry, *[None] * made]
