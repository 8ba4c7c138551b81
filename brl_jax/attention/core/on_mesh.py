"""Public functions divide themselves over the mesh around a call, by the axes that their annotations name.

"B" is the batch, and "N" and "K" are the heads of queries and of keys. A function that also divides tokens says so in
its `Cut`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from brl_jax.fields import field_hints
from brl_jax.sharding import automatic_axes, sequence_axis, shard_call

_NAMES = {"B": "batch", "N": "heads", "K": "kv_heads"}
Letters = Sequence[str]


class Cut(NamedTuple):
    """How one call is divided.

    Attributes:
      names: logical names (`brl_jax.sharding.RULES`) of other axes.
      given: arguments that replace the caller's.
      run: computes a device's part, from the arguments that differ from the defaults; None: the function itself.
    """

    names: Mapping[str, str] = {}
    given: Mapping[str, Any] = {}
    run: Callable[..., Any] | None = None


#: rule(function, **arguments) returns the `Cut` of a call; None leaves the call to the compiler.
Rule = Callable[..., Cut | None]


def absent(arguments: Mapping[str, Any], *names: str) -> bool:
    """Whether each of these arguments is None, False or 0."""
    values = [arguments.get(name) for name in names]
    return all(x is None or (isinstance(x, int) and not x) for x in values)


def rows_and_heads(*_: Any, **__: Any) -> Cut:
    """The rule of functions that keep tokens whole."""
    return Cut()


def whole_rows(*exchanged: str) -> Rule:
    """The rule of functions that need whole rows: where rows are cut, each device takes some heads of whole rows.

    The devices exchange shards of all heads for whole rows of some heads (`all_to_all`), and then exchange the outputs
    back (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv:2309.14509). If n devices and the number of heads have the
    greatest common divisor g, each head is computed by n / g devices.

    Args:
      exchanged: the arguments (B, T, heads, features). Numbers of heads may differ if each divides the first or is a
        multiple of it; grouped heads stay together.
    """

    def rule(function: Callable[..., Array], **arguments: Any) -> Cut | None:
        axis = sequence_axis(arguments[exchanged[0]].shape[1])
        if axis is None or not absent(arguments, "state"):
            return None
        return Cut({"T": "length"}, run=functools.partial(_by_heads, axis, exchanged, function))

    return rule


def _by_heads(axis: str, exchanged: Sequence[str], function: Callable[..., Array], **arguments: Any) -> Array:
    size = lax.axis_size(axis)
    parts = math.gcd(size, *(arguments[name].shape[2] for name in exchanged))
    # Neighbours exchange heads; then those that have the same heads exchange their tokens.
    near = [[first + i for i in range(parts)] for first in range(0, size, parts)]
    far = [[first + i for first in range(0, size, parts)] for i in range(parts)]

    def swap(x: Array, split: int, join: int) -> Array:
        if parts == 1:
            return x
        return lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True, axis_index_groups=near)

    def gather(x: Array) -> Array:
        x = swap(x, 2, 1)
        return x if parts == size else lax.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=far)

    out = function(**arguments | {name: gather(arguments[name]) for name in exchanged})
    count = out.shape[1] // len(near)
    out = lax.dynamic_slice_in_dim(out, lax.axis_index(axis) // parts * count, count, axis=1)
    return swap(out, 1, 2)


def call_on_mesh(function: Callable[..., Any], rule: Rule, args: Any, kwargs: Any) -> Any:
    """function(*args, **kwargs), each device of the mesh computing the part that the rule gives it."""
    if not automatic_axes():
        return function(*args, **kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    cut, hints = rule(function, **bound.arguments), _hints(function)
    if cut is None:
        return function(*args, **kwargs)
    defaults = {name: parameter.default for name, parameter in bound.signature.parameters.items()}
    arguments = {**bound.arguments, **cut.given}
    arguments = {name: x for name, x in arguments.items() if x is not defaults[name]}
    leaves, structure = jax.tree.flatten(list(arguments.values()))
    letters: list[Any] = [each for name, value in arguments.items() for each in _letters(value, hints[name])]
    if None in letters:
        return function(*args, **kwargs)
    places = [i for i, x in enumerate(leaves) if _is_array(x)]

    def on_shards(*shards: Any) -> Any:
        parts = list(leaves)
        for i, shard in zip(places, shards):
            parts[i] = shard
        return (cut.run or function)(**dict(zip(arguments, jax.tree.unflatten(structure, parts))))

    def named(axes: Letters) -> tuple[str | None, ...]:
        return tuple(map({**_NAMES, **cut.names}.get, axes))

    kinds = _kinds(hints["return"])
    several = arguments.get("return_residual", False)
    if several:
        pair = next(kind for kind in kinds if typing.get_origin(kind) is tuple)
        kinds = [_kinds(kind)[0] for kind in typing.get_args(pair)]
    outs = tuple(named(kind.dim_str.split()) for kind in kinds if hasattr(kind, "dim_str"))
    operands = [leaves[i] for i in places]
    return shard_call(on_shards, operands, [named(letters[i]) for i in places], outs if several else outs[0])


@functools.cache
def _hints(function: Any) -> dict[str, Any]:
    return typing.get_type_hints(function)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _kinds(hint: Any) -> Sequence[Any]:
    is_one = hasattr(hint, "dim_str") or typing.get_origin(hint) is tuple
    return (hint,) if is_one else typing.get_args(hint)


def _letters(value: Any, hint: Any) -> list[Letters | None]:
    """The axes of each leaf of an argument, by its annotation; None for a leaf whose axes are unknown."""
    if _is_array(value):
        found = [_fitting(value, kind.dim_str.split()) for kind in _kinds(hint) if hasattr(kind, "dim_str")]
        return [next(filter(None, found), None if value.ndim else ())]
    parts: list[Any] = []
    if isinstance(value, tuple | list):
        kinds = next((typing.get_args(kind) for kind in _kinds(hint) if typing.get_origin(kind) is tuple), ())
        parts = list(zip(value, kinds))
    elif dataclasses.is_dataclass(value):  # a position bias
        parts = [(getattr(value, name), kind) for name, kind in field_hints(type(value)).items()]
        parts = [(x, kind) for x, kind in parts if _is_array(x)]
    letters = [each for part in parts for each in _letters(*part)]
    leaves = jax.tree.leaves(value)
    return letters if len(letters) == len(leaves) else [None if _is_array(x) else () for x in leaves]


def _fitting(value: Any, letters: Letters) -> Letters | None:
    """The letters of an annotation, "-" for an axis that broadcasts; None if the value has another number of axes."""
    if letters == ["..."]:
        letters = ["#B", "#N", "#T", "#S"][4 - value.ndim :]
    if len(letters) != value.ndim:
        return None
    return ["-" if x[0] == "#" and size == 1 else x.lstrip("#") for x, size in zip(letters, value.shape)]
