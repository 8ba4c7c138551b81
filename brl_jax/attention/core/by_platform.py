"""Functions with a form for each platform. Only the form of the platform that a call is lowered for is traced.

`jax.lax.platform_dependent` traces the forms of all platforms, in every call and again in its gradient. Here a call is
one primitive, whose shapes the caller states. Its lowering rule picks the form of the platform and traces that alone.
The gradient is a second primitive: it reads the operands, the results and what the forms keep for it, and picks its
form in the same way.

A gradient in reverse mode uses these forms. Everything else (forward mode, derivatives of gradients) comes from a
plain function of JAX's operations, which is traced only when it is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from brl_jax.attention.core.program_keys import Keyed
from brl_jax.attention.core.varying import vary_like

#: The platforms that forms are chosen for; "default" is every other.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "default")

#: The platform that is traced for, inside a form; None elsewhere. `jax.jit` traces again for another value.
traced_for = jax.make_user_context(None)


class Form(NamedTuple):
    """How one platform computes a function of operands.

    Attributes:
      run: `run(*operands)` returns (results, kept), where kept is what the gradient needs in addition to operands and
        results. The shapes of both are the same on every platform that has a gradient.
      gradient: `gradient(operands, results, kept, d_results)` returns the gradients of the operands: pytrees like
        them, whose leaves may be None where they have no gradient. None differentiates `run`, which then runs again;
        what it keeps is not read.
    """

    run: Callable[..., tuple[Any, Any]]
    gradient: Callable[..., Sequence[Any]] | None = None


def without_kept(function: Callable[..., Any]) -> Form:
    """The form of a function that keeps nothing for its gradient."""
    return Form(lambda *operands: (function(*operands), ()))


def gradient_of_known(run: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a form whose `run` takes `known`, what an earlier run returned, and then works only in the
    backward pass."""

    def gradient(operands: Any, results: Any, kept: Any, d_results: Any, **options: Any) -> Any:
        again = functools.partial(run, known=(results, kept), **options)
        return jax.vjp(lambda *operands: again(*operands)[0], *operands)[1](d_results)

    return gradient


def by_platform(
    choose: Callable[..., Form],
    *operands: Any,
    results: Any,
    kept: Any = (),
    plain: Callable[..., Any],
    axis_name: str | None = None,
    needs_devices: bool = False,
) -> Any:
    """Calls the form of the platform that the call is lowered for.

    Args:
      choose: `choose(platform, *operands)` returns the form of one of `PLATFORMS`. It is called when the call is
        lowered, and may raise or warn.
      operands: pytrees of arrays.
      results, kept: pytrees of `jax.ShapeDtypeStruct` (or arrays, whose shape and dtype alone count), as the forms
        return them.
      plain: `plain(*operands)` returns the results by JAX's operations, differentiable any number of times.
      axis_name: inside `jax.shard_map`, an axis over which the forms exchange values, so that the results are the same
        on all its devices.
      needs_devices: whether a form uses cuDNN or calls back to Python, whose lowering asks JAX for the devices.
    """
    operands = vary_like(operands, operands, but=axis_name)
    leaves, structure = jax.tree.flatten(operands)
    # Results vary over the axes that operands vary over, except for the axis that is summed over.
    first = next(
        (x for x in map(jax.typeof, leaves) if axis_name not in x.manual_axis_type.varying),
        jax.typeof(leaves[0]),
    )
    results, kept = jax.tree.map(functools.partial(_like, first), (results, kept))
    function = _Function(choose, plain, structure, results, kept, _Context.current())
    asks = _asks_for_devices() if needs_devices else None
    outs = _call.bind(*leaves, function=function, keep=False, asks=asks)
    return jax.tree.unflatten(function.out_structure, outs)


def recomputed(function: Callable[..., Any], *operands: Any) -> Any:
    """function(*operands) in the body of a loop. The gradient keeps operands and results alone, and runs it again.

    Unlike `jax.checkpoint`, it does so inside a layer whose own policy keeps results: in JAX, the policy of an outer
    checkpoint decides for those inside it as well. No policy reaches into a form.
    """
    if traced_for.value is not None:
        return jax.checkpoint(function, prevent_cse=False)(*operands)
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*operands)
    # JAX's caches keep `run`: it must not keep the arrays over which the function closes.
    jaxpr, number, outputs = closed.jaxpr, len(closed.consts), jax.tree.structure(shapes)

    def run(*leaves: Array) -> Any:
        results = jaxpr_as_fun(ClosedJaxpr(jaxpr, list(leaves[:number])))(*leaves[number:])
        return jax.tree.unflatten(outputs, results)

    form = without_kept(run)
    leaves, structure = jax.tree.flatten((*closed.consts, *jax.tree.leaves(operands)))
    # Inside `jax.shard_map` operands and results vary over the axes that the operations say.
    results = jax.tree.unflatten(outputs, closed.out_avals)
    called = _Function(lambda *_: form, run, structure, results, (), _Context.current())
    outs = _call.bind(*leaves, function=called, keep=False, asks=None)
    return jax.tree.unflatten(called.out_structure, outs)


def branches(*operands: Any, default: Callable[..., Any], **others: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent`, which traces the branch of one platform alone inside a form.

    For small functions that JAX differentiates, and whose branches cost little to trace elsewhere.
    """
    platform = traced_for.value
    if platform is None:
        return lax.platform_dependent(*operands, default=default, **others)
    return others.get(platform, default)(*operands)


def platform_jaxpr(equation: Any, platform: str) -> Any:
    """The operations of an equation as a closed jaxpr, if it is a call of `by_platform` or its gradient; else None."""
    rules: dict[Primitive, Callable[..., list]] = {_call: _run_call, _linear: _run_linear}
    if equation.primitive not in rules:
        return None
    run = functools.partial(rules[equation.primitive], platform, **equation.params)
    types = [x.aval for x in equation.invars]
    mesh = types[0].sharding.mesh
    with traced_for(platform):
        if not mesh.manual_axes:
            return jax.make_jaxpr(run)(*types)
        return _traced_on_devices(run, types, mesh)


def _traced_on_devices(run: Callable[..., list], types: Sequence[Any], mesh: Any) -> Any:
    """The operations of `run` as one of the devices of a `jax.shard_map` calls it."""
    axes, sizes = mesh.manual_axes, dict(zip(mesh.axis_names, mesh.axis_sizes))
    varying = [tuple(axis for axis in axes if axis in x.manual_axis_type.varying) for x in types]
    # A device's own array is the part of a larger one, whose first axis has an entry for each device.
    entire = [
        jax.ShapeDtypeStruct((math.prod(sizes[axis] for axis in own), *x.shape), x.dtype)
        for own, x in zip(varying, types)
    ]
    outside = mesh.update_axis_types(dict.fromkeys(axes, jax.sharding.AxisType.Auto))
    mapped = jax.shard_map(
        lambda *parts: [x[None] for x in run(*(x[0] for x in parts))],
        mesh=outside,
        in_specs=tuple(jax.P(own or None) for own in varying),
        out_specs=jax.P(axes),
        axis_names=set(axes),
        check_vma=any(varying),
    )
    with jax.sharding.use_abstract_mesh(outside):
        (equation,) = jax.make_jaxpr(mapped)(*entire).eqns
    return equation.params["jaxpr"]


@functools.cache
def _asks_for_devices() -> Any:
    """A jaxpr that is never run. JAX passes the devices on to lowering rules only if it finds an operation that needs
    them, in the program or in a parameter like this; the operations of a form do not exist yet."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.make_jaxpr(functools.partial(jax.pure_callback, lambda x: x, number))(number)


def _like(first: Any, x: Any) -> Any:
    """The type of an array of x's shape and dtype that varies over the mesh axes that the first operand varies over."""
    sharding = first.sharding.update(spec=jax.P(*(None,) * len(x.shape)))
    return first.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding)


class _Context(NamedTuple):
    """The settings around a call that change how its forms are traced. The call decides them, not its lowering."""

    precision: Any
    wide: bool
    mesh: Any

    @classmethod
    def current(cls) -> _Context:
        config: Any = jax.config
        return cls(
            config.jax_default_matmul_precision, config.jax_enable_x64, jax.sharding.get_abstract_mesh()
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with (
            jax.default_matmul_precision(self.precision),
            jax.enable_x64(self.wide),
            jax.sharding.use_abstract_mesh(self.mesh),
        ):
            yield


class _Function:
    """A function of the leaves of its operands, and its gradient.

    Attributes:
      results, kept: the types of their leaves.
    """

    def __init__(self, choose: Any, plain: Any, structure: Any, results: Any, kept: Any, context: _Context):
        self._choose, self._plain, self._structure, self._context = choose, plain, structure, context
        self.results, self.out_structure = jax.tree.flatten(results)
        self.kept, self._kept_structure = jax.tree.flatten(kept)

    def described_by(self) -> Any:
        return vars(self)

    @property
    def floating(self) -> list[int]:
        """The places of the floating-point results, which alone have gradients."""
        return [i for i, x in enumerate(self.results) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def run(self, platform: str, *leaves: Any) -> list:
        """The leaves of the results and of what is kept."""
        with self._context.again():
            operands = jax.tree.unflatten(self._structure, leaves)
            form = self._choose(platform, *operands)
            results, kept = form.run(*operands)
            if form.gradient is None:
                kept = [jnp.zeros(x.shape, x.dtype) for x in self.kept]
        return jax.tree.leaves((results, kept))

    def gradient(self, platform: str, leaves: Any, outs: Any, d_results: Any, moving: tuple) -> list:
        """The gradients of the leaves at the places `moving`, given the floating-point results' gradients."""
        still = [np.zeros(x.shape, jax.dtypes.float0) for x in self.results]
        d_results = replaced(still, self.floating, d_results)
        with self._context.again():
            operands = jax.tree.unflatten(self._structure, leaves)
            form = self._choose(platform, *operands)
            if form.gradient is None:

                def run(*moved: Any) -> list:
                    operands = jax.tree.unflatten(self._structure, replaced(leaves, moving, moved))
                    return jax.tree.leaves(form.run(*operands)[0])

                return list(jax.vjp(run, *(leaves[i] for i in moving))[1](d_results))
            results, kept = outs[: len(self.results)], outs[len(self.results) :]
            gradients = form.gradient(
                operands,
                jax.tree.unflatten(self.out_structure, results),
                jax.tree.unflatten(self._kept_structure, kept),
                jax.tree.unflatten(self.out_structure, d_results),
            )
        every = self._structure.flatten_up_to(tuple(gradients))
        return [_as_gradient(every[i], leaves[i]) for i in moving]

    def plain(self, *leaves: Any) -> list:
        with self._context.again():
            return jax.tree.leaves(self._plain(*jax.tree.unflatten(self._structure, leaves)))


def _as_gradient(gradient: Any, leaf: Any) -> Any:
    return jnp.zeros_like(leaf) if gradient is None else gradient.astype(leaf.dtype)


class _Mapped(_Function):
    """A function under `jax.vmap`; its results and what it keeps are mapped along their first axis."""

    def __init__(self, function: _Function, axes: tuple, size: int):
        self._function, self._axes, self._size = function, axes, size
        self.out_structure = function.out_structure
        self.results, self.kept = (_stacked(size, types) for types in (function.results, function.kept))

    def _over(self, function: Callable[..., list], *axes: Any, out_axes: Any = 0) -> Callable[..., list]:
        return jax.vmap(function, in_axes=axes, out_axes=out_axes, axis_size=self._size)

    def run(self, platform: str, *leaves: Any) -> list:
        return self._over(functools.partial(self._function.run, platform), *self._axes)(*leaves)

    def gradient(self, platform: str, leaves: Any, outs: Any, d_results: Any, moving: tuple) -> list:
        def one(leaves: Any, outs: Any, d_results: Any) -> list:
            return self._function.gradient(platform, leaves, outs, d_results, moving)

        axes = [self._axes[i] for i in moving]
        each = self._over(one, list(self._axes), 0, 0, out_axes=[a or 0 for a in axes])
        gradients = each(list(leaves), list(outs), list(d_results))
        return [g.sum(0).astype(g.dtype) if a is None else g for g, a in zip(gradients, axes)]

    def plain(self, *leaves: Any) -> list:
        return self._over(self._function.plain, *self._axes)(*leaves)


def _stacked(size: int, types: Sequence[Any]) -> list:
    return [_like(x, jax.ShapeDtypeStruct((size, *x.shape), x.dtype)) for x in types]


def replaced(values: Any, places: Sequence[int], others: Any) -> list:
    """The values as a list, with others at some places."""
    given = list(values)
    for i, x in zip(places, others):
        given[i] = x
    return given


def _primitive(name: str, run: Callable[..., list], result_types: Callable[..., list]) -> Primitive:
    """A primitive whose operations `run(platform, *arrays, **params)` are traced when it is lowered."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, **params: result_types(**params))

    def jitted(params: Any) -> Callable[..., list]:
        return jax.jit(functools.partial(primitive.bind, **params))

    known = functools.lru_cache(maxsize=1024)(lambda keyed: jitted(keyed.value))

    @primitive.def_impl
    def compiled(*arrays: Any, **params: Any) -> list:
        try:
            program = known(Keyed(params))
        except TypeError:  # a function closes over something that has no key
            program = jitted(params)
        with jax.disable_jit(False):  # there is no other way to run a primitive than to compile it
            return program(*arrays)

    def rule_of(platform: str) -> Callable[..., Any]:
        def run_there(*arrays: Any, **params: Any) -> list:
            there = traced_for.value or platform
            with traced_for(there):
                return run(there, *arrays, **params)

        return mlir.lower_fun(run_there, multiple_results=True)

    for platform in PLATFORMS:
        mlir.register_lowering(
            primitive, rule_of(platform), platform=None if platform == "default" else platform
        )
    return primitive


# --- The call: the results, followed by what is kept if `keep` is true ---


def _run_call(platform: str, *leaves: Any, function: _Function, keep: bool, asks: Any) -> list:
    outs = function.run(platform, *leaves)
    return outs if keep else outs[: len(function.results)]


def _call_types(function: _Function, keep: bool, asks: Any) -> list:
    return [*function.results, *function.kept] if keep else function.results


_call = _primitive("by_platform", _run_call, _call_types)


def _differentiate_call(
    leaves: Any, tangents: Any, *, function: _Function, keep: bool, asks: Any
) -> tuple[list, list]:
    outs = _call.bind(*leaves, function=function, keep=True, asks=asks)
    moving = tuple(i for i, tangent in enumerate(tangents) if _moves(tangent))
    count = len(leaves)

    def moved(leaves: Any, values: Any) -> list:
        results = function.plain(*replaced(leaves, moving, values))
        return [results[i] for i in function.floating]

    def tangent(platform: str, residuals: Any, changes: Any) -> list:
        leaves = residuals[:count]
        return jax.jvp(lambda *values: moved(leaves, values), [leaves[i] for i in moving], list(changes))[1]

    def gradient(platform: str, residuals: Any, d_results: Any) -> list:
        return function.gradient(platform, residuals[:count], residuals[count:], d_results, moving)

    def plain_gradient(platform: str, residuals: Any, d_results: Any) -> list:
        leaves = residuals[:count]
        pull = jax.vjp(lambda *values: moved(leaves, values), *(leaves[i] for i in moving))[1]
        return list(pull(list(d_results)))

    inputs = [jax.typeof(leaves[i]).strip_weak_type() for i in moving]
    linear = _Linear(
        tangent, tangent, gradient, plain_gradient, inputs, [function.results[i] for i in function.floating]
    )
    d_results = _linear.bind(*leaves, *outs, *(tangents[i] for i in moving), linear=linear, asks=asks)
    # Kept values have no tangents, because only the gradient reads them. Its derivative comes from the plain function.
    outs = outs if keep else outs[: len(function.results)]
    zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
    return outs, replaced(zeros, function.floating, d_results)


def _batch_call(
    leaves: Any, axes: Any, *, function: _Function, keep: bool, asks: Any
) -> tuple[list, list[int]]:
    mapped = _Mapped(function, tuple(axes), _axis_size(leaves, axes))
    outs = _call.bind(*leaves, function=mapped, keep=keep, asks=asks)
    return outs, [0] * len(outs)


def _axis_size(arrays: Any, axes: Any) -> int:
    return next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)


def _moves(tangent: Any) -> bool:
    return type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0


ad.primitive_jvps[_call] = _differentiate_call
batching.primitive_batchers[_call] = _batch_call


# --- Its tangents, a linear map of residuals and values; transposed it is the gradient ---


@dataclasses.dataclass(frozen=True, eq=False)
class _Linear:
    """A linear map that depends on residuals, and its transpose.

    Attributes:
      run, transposed: (platform, residuals, values) -> values.
      plain, plain_transposed: the same by JAX's operations, as functions of the residuals as well.
      inputs, outputs: the types of the values.
    """

    run: Callable[..., list]
    plain: Callable[..., list]
    transposed: Callable[..., list]
    plain_transposed: Callable[..., list]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def described_by(self) -> Any:
        return vars(self)

    def transpose(self) -> _Linear:
        forwards = (self.run, self.plain)
        return _Linear(self.transposed, self.plain_transposed, *forwards, self.outputs, self.inputs)

    def split(self, arrays: Any) -> tuple[list, list]:
        """The residuals and the values."""
        count = len(arrays) - len(self.inputs)
        return list(arrays[:count]), list(arrays[count:])


def _run_linear(platform: str, *arrays: Any, linear: _Linear, asks: Any) -> list:
    return linear.run(platform, *linear.split(arrays))


_linear = _primitive("by_platform_linear", _run_linear, lambda linear, asks: list(linear.outputs))


def _differentiate_linear(arrays: Any, tangents: Any, *, linear: _Linear, asks: Any) -> tuple[list, list]:
    residuals, values = linear.split(arrays)
    d_residuals, d_values = linear.split(tangents)
    outs = _linear.bind(*arrays, linear=linear, asks=asks)
    d_outs = _linear.bind(*residuals, *map(ad.instantiate_zeros, d_values), linear=linear, asks=asks)
    moving = [i for i, change in enumerate(d_residuals) if _moves(change)]
    if moving:

        def of_moving(*moved: Any) -> list:
            return linear.plain("default", replaced(residuals, moving, moved), values)

        primals, changes = ([xs[i] for i in moving] for xs in (residuals, d_residuals))
        more = jax.jvp(of_moving, primals, changes)[1]
        d_outs = [a + b for a, b in zip(d_outs, more)]
    return outs, d_outs


def _transpose_linear(cotangents: Any, *arrays: Any, linear: _Linear, asks: Any) -> list:
    residuals, values = linear.split(arrays)
    given = map(ad.instantiate_zeros, cotangents)
    outs = _linear.bind(*residuals, *given, linear=linear.transpose(), asks=asks)
    # Values that are known here are zeros, for values without a tangent. They get no cotangent.
    wanted = [out if ad.is_undefined_primal(value) else None for out, value in zip(outs, values)]
    return [None] * len(residuals) + wanted


def _batch_linear(arrays: Any, axes: Any, *, linear: _Linear, asks: Any) -> tuple[list, list[int]]:
    size = _axis_size(arrays, axes)
    residuals, values = linear.split(arrays)
    residual_axes, value_axes = linear.split(axes)
    values = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values, value_axes)
    ]

    def over(function: Callable[..., list]) -> Callable[..., list]:
        def run(platform: str, residuals: Any, values: Any) -> list:
            mapped = jax.vmap(
                functools.partial(function, platform), in_axes=(residual_axes, 0), axis_size=size
            )
            return mapped(list(residuals), list(values))

        return run

    forwards = (over(linear.run), over(linear.plain))
    backwards = (over(linear.transposed), over(linear.plain_transposed))
    types = (_stacked(size, linear.inputs), _stacked(size, linear.outputs))
    outs = _linear.bind(*residuals, *values, linear=_Linear(*forwards, *backwards, *types), asks=asks)
    return outs, [0] * len(outs)


ad.primitive_jvps[_linear] = _differentiate_linear
ad.primitive_transposes[_linear] = _transpose_linear
batching.primitive_batchers[_linear] = _batch_linear
