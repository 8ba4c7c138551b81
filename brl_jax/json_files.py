"""Reading JSON that another program, another version or a crash may have written.

    read_json(path, {"step": int, "score": float | None, "names": list[str]})

returns the values, or raises ValueError with one line that names the file and the field.
"""

from __future__ import annotations

import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any

_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
}


# What a line is called whose place the caller names.
_LINE = "the line"


def check_regular(path: Any) -> None:
    """Raises ValueError if a local path is a device, a pipe or another thing that reading might wait for."""
    if "://" not in os.fspath(path) and Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{os.fspath(path)} is not a regular file")


def read_json(path: Any, schema: Any = Any) -> Any:
    """The values in a JSON file.

    Args:
      path: a `pathlib.Path`, or another path with `read_bytes`. schema: see `check_json`.

    Raises:
      OSError: the file cannot be read. ValueError: it holds something else.
    """
    check_regular(path)
    return parse_json(path.read_bytes(), schema, os.fspath(path))


def parse_json(text: str | bytes, schema: Any = Any, name: str = _LINE) -> Any:
    """The values in a JSON text, whose numbers are finite; `name` is what errors call it.

    Raises:
      ValueError: it is not JSON, is nested too deep, or doesn't match the schema (see `check_json`).
    """
    try:
        values = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"{name} is not JSON: nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    check_json(values, schema, name)
    return values


def check_json(value: Any, schema: Any, name: str) -> None:
    """Raises ValueError, with the field's name, unless a JSON value matches a schema.

    Args:
      schema: a type (int, float, str, bool, dict, list, None), list[T], dict[str, T], a union, Any, or a dictionary of
        the fields that an object must have; it may have others.
    """
    origin, arguments = typing.get_origin(schema), typing.get_args(schema)
    if isinstance(schema, dict):
        check_json(value, dict, name)
        for field, kind in schema.items():
            if field not in value:
                raise ValueError(f"{_inside(name, field)} is missing")
            check_json(value[field], kind, _inside(name, field))
    elif origin in (types.UnionType, typing.Union):
        for kind in arguments:
            try:
                return check_json(value, kind, name)
            except ValueError:
                continue
        expected = " or ".join(_word(kind) for kind in arguments)
        raise ValueError(f"{name} must be {expected}, got {_shown(value)}")
    elif origin is list:
        check_json(value, list, name)
        for i, item in enumerate(value):
            check_json(item, arguments[0], f"{name}[{i}]")
    elif origin is dict:
        check_json(value, dict, name)
        for key, item in value.items():
            check_json(item, arguments[1], _inside(name, key))
    elif schema is not Any and not _fits(value, schema):
        raise ValueError(f"{name} must be {_word(schema)}, got {_shown(value)}")
    return None


def _inside(name: str, field: str) -> str:
    return field if name == _LINE else f"{name}: {field}"


def _fits(value: Any, kind: Any) -> bool:
    if kind in (None, type(None)):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _word(kind: Any) -> str:
    return "null" if kind in (None, type(None)) else _WORDS.get(typing.get_origin(kind) or kind, str(kind))


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (RecursionError, TypeError):
        return type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)
