"""Decorators of public functions, for absent batch axes, symbolic batch sizes and explicit meshes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from brl_jax.attention.core.by_platform import replaced
from brl_jax.attention.core.checks import require
from brl_jax.attention.core.on_mesh import Rule, call_on_mesh
from brl_jax.fields import argument_checks

P = ParamSpec("P")
R = TypeVar("R")


def attention_function(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function accept symbolic batch sizes, and arrays that are sharded over an explicit mesh.

    Arguments that do not fit their annotations raise ValueError first (`brl_jax.fields`).

    Symbolic batch sizes (`jax.export`): loops and tiles need known sizes, so the function is planned for one sequence
    and `jax.vmap` adds the batch. Such calls go through XLA unless they name another implementation.

    Explicit meshes: functions split, merge and pad heads, which JAX refuses for a sharded axis if the sharding of the
    result is ambiguous. So the function runs under an automatic mesh, where the compiler divides the work. The output
    is sharded like the query; states and residuals only by batch.

    The first argument must be the queries, the values or the tokens, with the batch as first axis.
    """
    return _decorated(function, None)


def divided(rule: Rule) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`attention_function`, for a function that divides itself over the automatic mesh around a call (`on_mesh`)."""
    return lambda function: _decorated(function, rule)


def _decorated(function: Callable[P, R], rule: Rule | None) -> Callable[P, R]:
    signature = inspect.signature(function)
    names = tuple(signature.parameters)
    check_arguments = argument_checks(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(args, kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))
        arrays, symbolic, explicit = [], [], False
        for i, x in enumerate(leaves):
            if isinstance(x, jax.Array):
                arrays.append(i)
                explicit = explicit or AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
                if any(map(jax.export.is_symbolic_dim, x.shape)):
                    symbolic.append(i)
        if not symbolic and not explicit:
            if rule is not None and not jax.sharding.get_abstract_mesh().empty:
                return call_on_mesh(function, rule, args, kwargs)
            return function(*args, **kwargs)

        def of_leaves(*given: Any, **options: Any) -> Any:
            args, kwargs = jax.tree.unflatten(structure, replaced(leaves, changing, given))
            # Inside the automatic mesh the batch may still be symbolic.
            return (call if explicit else function)(*args, **{**kwargs, **options})

        changing = arrays if explicit else symbolic
        if explicit:
            signature.bind(*args, **kwargs)  # raises the TypeError of a missing argument
            given = [*args, *(kwargs.get(name) for name in names[len(args) : 2])]
            return _with_automatic_mesh(of_leaves, [leaves[i] for i in arrays], *given[:2])
        named = "implementation" in names and kwargs.get("implementation") is None
        options = {"implementation": "xla"} if named else {}
        return _one_by_one(functools.partial(of_leaves, **options), [leaves[i] for i in symbolic])

    return call


def batch_optional(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function accept query, key and value without a batch axis, like `jax.nn.dot_product_attention`.

    If all three have three axes, they get a batch of 1, and so do segment ids and scalar lengths. Bias and mask
    broadcast as they are. The results lose the axis again.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if getattr(args[0] if args else kwargs.get("query"), "ndim", None) != 3:
            return function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        names = ("query", "key", "value")
        if any(getattr(given[name], "ndim", None) != 3 for name in names):
            return function(*args, **kwargs)
        require(
            not given.get("return_state") and given.get("state") is None,
            "query, key and value must have a batch axis with state and return_state",
        )
        for name in (*names, "segment_ids"):
            if given.get(name) is not None:
                given[name] = jax.tree.map(lambda x: x[None], given[name])
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            lengths = given.get(name)
            if lengths is not None:
                given[name] = jnp.asarray(lengths)[None] if jnp.ndim(lengths) == 0 else lengths
        return jax.tree.map(lambda x: x[0], function(*bound.args, **bound.kwargs))

    return call


def _one_by_one(function: Callable[..., Any], arrays: list) -> Any:
    """A function of arrays (B, ...) with a symbolic B."""
    for x in arrays:
        known = jax.export.is_symbolic_dim(x.shape[0]) and not any(
            map(jax.export.is_symbolic_dim, x.shape[1:])
        )
        require(known, f"only the batch, the first axis, may have a symbolic size, got shape {x.shape}")
    outs = jax.vmap(lambda *rows: function(*(row[None] for row in rows)))(*arrays)
    # A number that all sequences share, such as the length of a state, has no batch axis.
    return jax.tree.map(lambda x: x[:, 0] if x.ndim > 1 else x[0], outs)


def _is_explicit(x: Any) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _with_automatic_mesh(function: Callable[..., Any], arrays: list, first: Any, second: Any) -> Any:
    """A function of arrays, among them the queries (B, T, N, H), or the tokens (B, T, D) and then the values."""
    mesh = next(jax.typeof(x).sharding.mesh for x in arrays if _is_explicit(x))
    spec = _spec(first)

    def out_sharding(out: Any) -> NamedSharding:
        if out.shape[:-1] == first.shape[:-1]:
            axes = spec[:-1]
        elif first.ndim == 3 and out.shape[:2] == first.shape[:2]:
            axes = (*spec[:2], _spec(second)[2])
        elif first.ndim == 4 and out.ndim == 4 and out.shape[:2] == first.shape[:2]:
            axes = spec[:3]  # values came first, and the output has more heads
        else:
            axes = spec[: min(1, out.ndim)]
        return NamedSharding(mesh, PartitionSpec(*axes))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    shardings = jax.tree.map(out_sharding, jax.eval_shape(function, *shapes))
    return auto_axes(function, out_sharding=shardings)(*arrays)


def _spec(x: Any) -> tuple:
    """The mesh axes of each axis of an array."""
    spec = tuple(jax.typeof(x).sharding.spec) if _is_explicit(x) else ()
    return spec + (None,) * (x.ndim - len(spec))
