"""Checks the arguments of public functions against their annotations, by the rules of `brl_jax.fields`."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from brl_jax.fields import check_value, is_checked

P = ParamSpec("P")
R = TypeVar("R")


def declared(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function, which raises ValueError for an argument that does not fit its annotation."""
    check_arguments = argument_checks(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_arguments(args, kwargs)
        return function(*args, **kwargs)

    return call


def argument_checks(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Returns a check of a call's positional and keyword arguments, which raises ValueError and names the argument."""
    names = tuple(inspect.signature(function).parameters)

    @functools.cache  # at the first call, because to read annotations of arrays takes milliseconds
    def checked_hints() -> dict[str, Any]:
        hints = typing.get_type_hints(function, include_extras=True)
        # Functions check these themselves and say more.
        return {
            name: hint
            for name, hint in hints.items()
            if name not in ("return", "implementation", "scale") and (is_checked(hint) or _is_key(hint))
        }

    def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hints = checked_hints()
        for name, value in (*zip(names, args), *kwargs.items()):
            if name not in hints:
                continue
            if _is_key(hints[name]):
                _check_key(name, value, optional=hints[name] != PRNGKeyArray)
            else:
                check_value(name, value, hints[name])

    return check_arguments


def _is_key(hint: Any) -> bool:
    return hint in (PRNGKeyArray, PRNGKeyArray | None)


def _check_key(name: str, value: Any, *, optional: bool) -> None:
    if value is None and optional:
        return
    dtype = getattr(value, "dtype", None)
    is_new = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (value.shape == () if is_new else dtype == jnp.uint32):
        words = "a random key, such as jax.random.key(0)" + (", or None" if optional else "")
        got = repr(value) if dtype is None else f"{dtype} of shape {value.shape}"
        raise ValueError(f"{name} must be {words}, got {got}")
