"""Functions with a gradient of their own that can be differentiated again, and in forward mode.

A function with `jax.custom_vjp` can be differentiated in reverse mode, once. The functions of this library have fast
gradients, in kernels or with scores computed anew, and a plain form of JAX operations besides. `differentiable` joins
the two: a gradient is the fast one; everything else, tangents and derivatives of gradients, comes from the plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def differentiable(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`fast`, with derivatives of any order and mode.

    Args:
      fast: operands (pytrees) to a pytree of floating-point arrays, differentiable once in reverse mode.
      plain: the same function of JAX operations, differentiable in every mode.

    Returns:
      A function with the outputs and the gradients of `fast`. Its tangents (forward mode) and the derivatives of its
      gradients are those of `plain`.
    """

    def call(*operands: Any) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        function = _Function(fast, plain, structure)
        jaxpr, shape = jax.make_jaxpr(function.fast_leaves, return_shape=True)(*leaves)
        outs = _call.bind(*leaves, jaxpr=jaxpr, function=function, num_outs=len(shape))
        return jax.tree.unflatten(function.out_structure, outs)

    return call


class _Function:
    """A function with a fast gradient and a plain form, of the leaves of its operands.

    Attributes:
      out_structure: that of its output, once it has been traced.
    """

    def __init__(self, fast: Callable[..., Any], plain: Callable[..., Any], structure: Any):
        self._fast, self._plain, self._structure = fast, plain, structure
        self.out_structure: Any = None

    def fast_leaves(self, *leaves: Any) -> list:
        outs, self.out_structure = jax.tree.flatten(self._fast(*jax.tree.unflatten(self._structure, leaves)))
        return outs

    def plain_leaves(self, *leaves: Any) -> list:
        return jax.tree.leaves(self._plain(*jax.tree.unflatten(self._structure, leaves)))

    def linearise(self, leaves: list, changes: list) -> tuple[list, list]:
        """The outputs and their tangents."""
        moving = [i for i, change in enumerate(changes) if _moves(change)]

        def of_moving(function: Callable[..., list], leaves: Any) -> Callable[..., list]:
            return lambda *values: function(*replaced(leaves, moving, values))

        count = len(leaves)
        pull_structure: Any = None
        repeated: list[int | None] = []

        def forward(*leaves: Any) -> tuple[list, list]:
            nonlocal pull_structure, repeated
            outs, pull = jax.vjp(of_moving(self.fast_leaves, leaves), *(leaves[i] for i in moving))
            kept, pull_structure = jax.tree.flatten(pull)
            places = {id(leaf): i for i, leaf in enumerate(leaves)}
            repeated = [places.get(id(x)) for x in kept]
            return outs, [x for x, place in zip(kept, repeated) if place is None]

        jaxpr, (outs, _) = jax.make_jaxpr(forward, return_shape=True)(*leaves)
        num_outs = len(outs)
        results = _call.bind(*leaves, jaxpr=jaxpr, function=self, num_outs=num_outs)
        outs, kept = results[:num_outs], results[num_outs:]

        def tangent(residuals: list, changes: list) -> list:
            leaves = residuals[:count]
            return jax.jvp(of_moving(self.plain_leaves, leaves), [leaves[i] for i in moving], changes)[1]

        def fast_gradient(residuals: list, d_outs: list) -> list:
            leaves, kept = residuals[:count], iter(residuals[count:])
            every = [next(kept) if place is None else leaves[place] for place in repeated]
            return list(jax.tree.unflatten(pull_structure, every)(d_outs))

        def plain_gradient(residuals: list, d_outs: list) -> list:
            leaves = residuals[:count]
            moved = [leaves[i] for i in moving]
            return list(jax.vjp(of_moving(self.plain_leaves, leaves), *moved)[1](d_outs))

        types = (
            tuple(jax.typeof(x).strip_weak_type() for x in xs) for xs in ([leaves[i] for i in moving], outs)
        )
        map_ = _LinearMap(tangent, tangent, fast_gradient, plain_gradient, *types)
        return outs, _apply(map_, [*leaves, *kept], [changes[i] for i in moving])


def replaced(values: Any, places: list[int], others: Any) -> list:
    """The values as a list, with others at some places."""
    given = list(values)
    for i, x in zip(places, others):
        given[i] = x
    return given


# The call itself, and the call that also returns what the fast gradient keeps, after the first `num_outs` results. What
# is kept has no tangents: that gradient alone reads it, whose derivatives are the plain form's.
_call = Primitive("brl_jax_call")
_call.multiple_results = True


def _run_call(*leaves: Any, jaxpr: Any, function: Any, num_outs: int) -> list:
    return jaxpr_as_fun(jaxpr)(*leaves)


def _differentiate_call(leaves: Any, tangents: Any, *, jaxpr: Any, function: _Function, num_outs: int):
    outs, d_outs = function.linearise(list(leaves), list(tangents))
    kept = []
    if len(jaxpr.out_avals) > num_outs:
        results = _call.bind(*leaves, jaxpr=jaxpr, function=function, num_outs=num_outs)
        outs, kept = results[:num_outs], results[num_outs:]
    return [*outs, *kept], [*d_outs, *(ad.Zero(jax.typeof(x).to_tangent_aval()) for x in kept)]


def _batch_call(leaves: Any, axes: Any, *, jaxpr: Any, function: _Function, num_outs: int):
    size = next(x.shape[axis] for x, axis in zip(leaves, axes) if axis is not None)
    mapped = _Mapped(function, tuple(axes), size)
    run = mapped.over(jaxpr_as_fun(jaxpr))
    outs = _call.bind(*leaves, jaxpr=jax.make_jaxpr(run)(*leaves), function=mapped, num_outs=num_outs)
    return outs, [0] * len(outs)


class _Mapped(_Function):
    """A function under `jax.vmap`."""

    def __init__(self, function: _Function, axes: tuple, size: int):
        self._function, self._axes, self._size = function, axes, size

    def over(self, function: Callable[..., list]) -> Callable[..., list]:
        return jax.vmap(function, in_axes=self._axes, axis_size=self._size)

    def fast_leaves(self, *leaves: Any) -> list:
        return self.over(self._function.fast_leaves)(*leaves)

    def plain_leaves(self, *leaves: Any) -> list:
        return self.over(self._function.plain_leaves)(*leaves)


_call.def_impl(_run_call)
_call.def_abstract_eval(lambda *_, jaxpr, **__: list(jaxpr.out_avals))
ad.primitive_jvps[_call] = _differentiate_call
batching.primitive_batchers[_call] = _batch_call
mlir.register_lowering(_call, mlir.lower_fun(_run_call, multiple_results=True))


def _moves(change: Any) -> bool:
    return type(change) is not ad.Zero and change.dtype != jax.dtypes.float0


class _LinearMap(NamedTuple):
    """A linear map that depends on residuals, and its transpose, each in a form that can be differentiated.

    Attributes:
      run, transposed: (residuals, values) -> values.
      plain, plain_transposed: the same by JAX's operations, as functions of the residuals as well.
      inputs, outputs: the types of the values.
    """

    run: Callable[[list, list], list]
    plain: Callable[[list, list], list]
    transposed: Callable[[list, list], list]
    plain_transposed: Callable[[list, list], list]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def transpose(self) -> _LinearMap:
        return _LinearMap(
            self.transposed, self.plain_transposed, self.run, self.plain, self.outputs, self.inputs
        )


_linear = Primitive("brl_jax_linear")
_linear.multiple_results = True


def _apply(map_: _LinearMap, residuals: list, values: list) -> list:
    return _linear.bind(*residuals, *values, map_=map_)


def _split(map_: _LinearMap, args: Any) -> tuple[list, list]:
    count = len(args) - len(map_.inputs)
    return list(args[:count]), list(args[count:])


def _run(*args: Any, map_: _LinearMap) -> list:
    return map_.run(*_split(map_, args))


def _differentiate(args: Any, tangents: Any, *, map_: _LinearMap) -> tuple[list, list]:
    residuals, values = _split(map_, args)
    d_residuals, d_values = _split(map_, tangents)
    outs = _apply(map_, residuals, values)
    moving = [i for i, change in enumerate(d_residuals) if _moves(change)]
    d_values = [ad.instantiate_zeros(t) for t in d_values]
    d_outs = _apply(map_, residuals, d_values)
    if moving:
        primals, changes = ([xs[i] for i in moving] for xs in (residuals, d_residuals))
        more = jax.jvp(lambda *xs: map_.plain(replaced(residuals, moving, xs), values), primals, changes)[1]
        d_outs = [a + b for a, b in zip(d_outs, more)]
    return outs, d_outs


def _transpose(cotangents: Any, *args: Any, map_: _LinearMap) -> list:
    residuals, values = _split(map_, args)
    given = [ad.instantiate_zeros(c) for c in cotangents]
    outs = _apply(map_.transpose(), residuals, given)
    # Values that are known here are zeros that stand for values without a tangent; they get no cotangent.
    wanted = [out if ad.is_undefined_primal(value) else None for out, value in zip(outs, values)]
    return [None] * len(residuals) + wanted


def _batch(args: Any, axes: Any, *, map_: _LinearMap) -> tuple[list, list[int]]:
    size = next(x.shape[axis] for x, axis in zip(args, axes) if axis is not None)
    residuals, values = _split(map_, args)
    residual_axes, value_axes = _split(map_, axes)
    values = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, value_axes)
    ]

    def mapped(function: Callable[[list, list], list]) -> Callable[[list, list], list]:
        return jax.vmap(function, in_axes=(residual_axes, 0), axis_size=size)

    inputs, outputs = (
        tuple(aval.update(shape=(size, *aval.shape)) for aval in avals)
        for avals in (map_.inputs, map_.outputs)
    )
    outs = _apply(
        _LinearMap(
            mapped(map_.run),
            mapped(map_.plain),
            mapped(map_.transposed),
            mapped(map_.plain_transposed),
            inputs,
            outputs,
        ),
        residuals,
        values,
    )
    return outs, [0] * len(outs)


_linear.def_impl(jax.jit(_run, static_argnames="map_"))
_linear.def_abstract_eval(lambda *_, map_: list(map_.outputs))
ad.primitive_jvps[_linear] = _differentiate
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_run, multiple_results=True))
