"""Checks configurations' fields and functions' arguments against the types and ranges that their annotations declare.

    @dataclasses.dataclass(frozen=True)
    class Config(Checked):
        num_layers: Annotated[int, Range(1, 1000)] = 4
        share: Annotated[float, Range(0, 1)] = 0.1

    Config(num_layers=0)     # ValueError: num_layers must be at least 1, got 0
    Config(num_layers="4")   # ValueError: num_layers must be an integer, got '4'

    @declared
    def slopes(num_heads: Count): ...

    slopes(2.5)              # ValueError: num_heads must be an integer, got 2.5

Integers without a range lie between -2^30 and 2^30, so that the sum of two fits in int32; other numbers are finite.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

P = ParamSpec("P")
R = TypeVar("R")

MOST = 2**30


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`; `above` and `below` exclude the ends."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    even: bool = False

    def complaint(self, value: float) -> str | None:
        """What a number must be and isn't; None if it lies in the range."""
        least = f"above {self.above}" if self.least is None else f"at least {self.least}"
        most = f"below {self.below}" if self.most is None else f"at most {self.most}"
        low = (self.above is not None and not value > self.above) or (
            self.least is not None and not value >= self.least
        )
        high = (self.below is not None and not value < self.below) or (
            self.most is not None and not value <= self.most
        )
        if (low or high) and self.least is not None and (self.most or MOST) < 1000:
            return f"{self.least} to {self.most}"
        if (low or high) and 1 in (self.below, self.most):  # a share
            return f"{least} and {most}"
        return least if low else most if high else "even" if self.even and value % 2 else None


Count = Annotated[int, Range(1, MOST)]
"""An integer of at least 1."""
Natural = Annotated[int, Range(0, MOST)]
"""An integer of at least 0."""
Even = Annotated[int, Range(2, MOST, even=True)]
"""An even integer of at least 2."""
Width = Annotated[int, Range(1, 2**20)]
"""A size inside a network."""
Rows = Annotated[int, Range(1, 2**20)]
"""Rows of a batch: arrays are made row by row."""
Length = Annotated[int, Range(1, 2**27)]
"""Tokens of a row."""
Steps = Annotated[int, Range(1, 2**31 - 1)]
"""Training steps, which are counted in int32."""
Seed = Annotated[int, Range(0, 2**63 - 1)]
"""What a random key can be made from."""
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(most=1, above=0)]


class Checked:
    """A base of dataclasses whose fields are checked before their own `__post_init__` runs."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: Any) -> None:
                Checked.__post_init__(self)
                own(self)

            cls.__post_init__ = checked  # type: ignore[method-assign]


def check_fields(config: Any) -> None:
    """Raises ValueError, with the field's name, unless every field of a dataclass fits its annotation. Lists become
    tuples."""
    checks: Any = _field_checks  # a class counts as hashable
    checks(type(config))((), vars(config))
    for name, value in vars(config).items():
        if isinstance(value, list):  # configurations are hashed
            object.__setattr__(config, name, tuple(value))


def declared(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises ValueError for an argument that does not fit its annotation."""
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
    def hints() -> dict[str, Any]:
        hints = typing.get_type_hints(function, include_extras=True)
        # Functions check these themselves and say more.
        return {name: hint for name, hint in hints.items() if name not in ("implementation", "scale")}

    return _checks(names, hints)


@functools.cache
def _field_checks(kind: type) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    return _checks((), functools.partial(field_hints, kind))


def _checks(
    names: tuple[str, ...], hints: Callable[[], Mapping[str, Any]]
) -> Callable[[tuple[Any, ...], Mapping[str, Any]], None]:
    # What fits: name and type, with the value or the types of items if they decide. Most calls repeat earlier ones.
    fitting: set[tuple] = set()

    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for name, value in (*zip(names, args), *kwargs.items()):
            kind = type(value)
            case: tuple = (name, kind, value) if kind in _PLAIN else (name, kind)
            if kind is tuple:
                case += tuple(map(type, value))
            if (name, kind) in fitting or case in fitting:
                continue
            hint = hints().get(name)
            if not is_checked(hint):
                fitting.add((name, kind))
                continue
            check_value(name, value, hint)
            items = value if kind is tuple else (value,)
            arrays = bool(items) and all(map(_is_array, items)) and not _is_key(hint)
            if kind in _PLAIN or value is None or hasattr(kind, "_fields") or arrays:
                if len(fitting) > 1000:
                    fitting.clear()
                fitting.add(case)

    return check


_PLAIN = (bool, int, float, str)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raises ValueError, with the name, unless the value fits the annotation."""
    complaint = complaint_about(value, hint)
    if complaint is not None:
        value = _offending(value, hint)
        if _is_array(value):
            got = f"{value.dtype} of shape {value.shape}"
        elif all(map(_array_kind, _members(hint))):
            got = type(value).__name__
        else:
            text = repr(value)
            got = text + _hint(value, hint) if len(text) <= 200 and "\n" not in text else type(value).__name__
        raise ValueError(f"{name} must be {complaint}, got {got}")


def _offending(value: Any, hint: Any) -> Any:
    """The item of a tuple or list that does not fit, or the value itself."""
    parts = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) in (tuple, Sequence)]
    kinds = typing.get_args(parts[0]) if parts else ()
    if isinstance(value, tuple | list) and kinds:
        return next((item for item in value if complaint_about(item, kinds[0]) is not None), value)
    return value


def _hint(value: Any, hint: Any) -> str:
    choices = [str(choice) for kind in _parts(hint) for choice in typing.get_args(kind)]
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _parts(hint: Any) -> Iterator[Any]:
    """The Literals in an annotation."""
    if typing.get_origin(hint) is Literal:
        yield hint
    else:
        for part in typing.get_args(hint):
            yield from _parts(part)


def field_hints(kind: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields, by name."""
    return _read_hints(kind)  # type: ignore[arg-type]


@functools.cache
def _read_hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def part_of(hint: Any) -> type | None:
    """Returns the dataclass in a field's type, or None."""
    options = (hint, *typing.get_args(hint))
    return next((kind for kind in options if dataclasses.is_dataclass(kind) and isinstance(kind, type)), None)


def is_checked(hint: Any) -> bool:
    """Whether `complaint_about` checks values of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return is_checked(arguments[0])
    if origin in (types.UnionType, typing.Union):
        kinds = _members(hint)
        each = [is_checked(kind) for kind in kinds]
        return _is_key(hint) or (any(each) and all(map(operator.or_, each, map(_is_array_hint, kinds))))
    is_plain = hint in (bool, int, float, str) or hasattr(hint, "_fields")
    return is_plain or origin in (Literal, Mapping, Sequence, tuple) or _array_kind(hint) is not None


def _members(hint: Any) -> list[Any]:
    """The types in a union, or the type itself, without None."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return [kind for kind in (typing.get_args(hint) if union else (hint,)) if kind is not type(None)]


def _is_array_hint(hint: Any) -> bool:
    return hasattr(hint, "array_type")  # jaxtyping's annotations


def _array_kind(hint: Any) -> str | None:
    """What an annotation of floats or bools asks for. None for other annotations, because functions accept lists
    of ints."""
    kinds: dict[Any, str] = {Float: "a floating-point array", Bool: "a bool array"}
    kind = kinds.get(getattr(hint, "dtype", None))
    letters = [] if kind is None else hint.dim_str.split()
    if kind is None or letters == ["..."]:
        return kind
    return f"{kind} of shape ({', '.join(letters)}{',' * (len(letters) == 1)})"


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, np.generic)


def _is_key(hint: Any) -> bool:
    return hint in (PRNGKeyArray, PRNGKeyArray | None)


def _key_complaint(value: Any, hint: Any) -> str | None:
    kind = str(getattr(value, "dtype", None))
    fits = value.shape == () if kind.startswith("key<") else kind == "uint32"
    if fits or (value is None and hint != PRNGKeyArray):
        return None
    return "a random key, such as jax.random.key(0)" + ("" if hint == PRNGKeyArray else ", or None")


def complaint_about(value: Any, hint: Any, within: Range | None = None) -> str | None:
    """What a value must be and isn't; None if it is right, or if the type is not one that is checked."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        found = next((mark for mark in hint.__metadata__ if isinstance(mark, Range)), within)
        return complaint_about(value, arguments[0], found)
    if _is_key(hint):
        return _key_complaint(value, hint)
    if origin in (types.UnionType, typing.Union):
        complaints = [complaint_about(value, kind, within) for kind in _members(hint)]
        if (value is None and type(None) in arguments) or None in complaints:
            return None
        if alike := [kind for kind in arguments if _has_type(value, kind)]:
            return complaint_about(value, alike[0], within)
        return " or ".join(dict.fromkeys(complaint for complaint in complaints if complaint))
    if origin is Literal:
        fits = any(
            value is choice or (type(value) is type(choice) and value == choice) for choice in arguments
        )
        return None if fits else f"{'one of ' * (len(arguments) > 1)}{', '.join(map(repr, arguments))}"
    if _is_array_hint(hint):
        return None if _is_array(value) else _array_kind(hint) or "an array"
    if hint is bool:
        return None if isinstance(value, bool | np.bool_) else "True or False"
    if hint in (int, float):
        return _number_complaint(value, hint, within)
    if hint is str:
        return None if isinstance(value, str) else "a string"
    if hasattr(hint, "_fields"):
        return None if isinstance(value, hint) else f"of type {hint.__name__}"
    if origin is Mapping:
        return None if isinstance(value, Mapping) else "an object"
    if origin is Sequence:
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
            return "a list"
        return next(filter(None, (complaint_about(item, arguments[0], within) for item in value)), None)
    if origin is tuple and arguments:
        if not isinstance(value, tuple | list):
            return "a tuple"
        if arguments[0] is bool and all(type(item) is bool for item in value):  # a large mask
            return None
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            return f"a tuple of {len(kinds)}"
        return next(
            filter(None, (complaint_about(item, kind, within) for item, kind in zip(value, kinds))), None
        )
    return None


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a value is a number or a tuple and the annotation asks for one, so that at most its range is wrong."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _has_type(value, typing.get_args(hint)[0])
    if hint in (int, float):
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    return origin is tuple and isinstance(value, tuple | list)


_NUMBERS = {int: int | np.integer, float: int | float | np.integer | np.floating}


def _number_complaint(value: Any, kind: type, within: Range | None) -> str | None:
    if not _has_type(value, kind):
        return "an integer" if kind is int else "a number"
    if kind is int:
        return (within or Range(-MOST, MOST)).complaint(int(value))
    complaint = None if within is None else within.complaint(float(value))
    return complaint or (None if math.isfinite(value) else "finite")
