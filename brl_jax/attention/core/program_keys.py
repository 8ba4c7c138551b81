"""Whether two functions compute the same, from their code and from what they close over.

Outside `jax.jit` JAX finds a compiled program by the identity of the function. A function that
a call defines would therefore be compiled at every call, which takes seconds.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Described(Protocol):
    """An object that `program_key` describes by some of its attributes."""

    def described_by(self) -> Any: ...


def program_key(x: Any) -> Hashable:
    """Returns a key that is equal for functions with the same code and equal values around it.

    Args:
      x: a function, or anything that a function may close over.

    Raises:
      TypeError: a value cannot be compared, such as an array.
    """
    if isinstance(x, functools.partial):
        return functools.partial, program_key((x.func, x.args, x.keywords))
    if isinstance(x, types.MethodType):
        return types.MethodType, program_key((x.__func__, x.__self__))
    if isinstance(x, types.FunctionType) and "<locals>" in x.__qualname__:  # others are made once
        around = (x.__defaults__, x.__kwdefaults__, tuple(cell.cell_contents for cell in x.__closure__ or ()))
        return x.__code__, program_key(around)
    if isinstance(x, tuple | list):
        return type(x), tuple(map(program_key, x))
    if isinstance(x, dict):
        return dict, program_key(tuple(x.items()))
    if isinstance(x, Described):
        return type(x), program_key(x.described_by())
    hash(x)
    return type(x), x  # the type, because 1 == 1.0 == True


class Keyed:
    """A value that equals others of the same `program_key`, for a cache of programs. Raises TypeError as it does."""

    def __init__(self, value: Any):
        self.value, self._key = value, program_key(value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self._key == other._key
