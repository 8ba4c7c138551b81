"""Checks the arguments of public functions against their annotations, by the rules of `brl_jax.fields`."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from brl_jax.fields import check_value, is_checked


def argument_checks(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    """Returns a check of a call's positional and keyword arguments, which raises ValueError and names the argument."""
    names = tuple(inspect.signature(function).parameters)

    @functools.cache  # at the first call, because to read annotations of arrays takes milliseconds
    def checked_hints() -> dict[str, Any]:
        hints = typing.get_type_hints(function, include_extras=True)
        # `dispatch` checks implementations and says which ones the function has.
        return {name: hint for name, hint in hints.items() if name != "implementation" and is_checked(hint)}

    def check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hints = checked_hints()
        for name, value in (*zip(names, args), *kwargs.items()):
            if name in hints:
                check_value(name, value, hints[name])

    return check_arguments
