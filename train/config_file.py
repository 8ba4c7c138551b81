"""Configurations as JSON: writing them, reading them back, and comparing that of a run with another."""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from etils import epath
from flax import traverse_util

from brl_jax.layers import MECHANISMS, Mechanism, mechanism_name
from train.errors import UserError
from train.fields import part_of

T = TypeVar("T")

# Parts of a configuration whose fields are options without a prefix.
_FLAT_PARTS = ("loop", "data", "model", "optimizer")


def to_json(config: Any) -> dict[str, Any]:
    """A configuration as nested dictionaries; a mechanism is its fields and its "name" in MECHANISMS."""
    values: dict[str, Any] = {}
    if isinstance(config, Mechanism):
        values["name"] = mechanism_name(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = to_json(value) if dataclasses.is_dataclass(value) else value
    return values


def from_json(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """The configuration that `to_json` wrote; missing fields have their defaults.

    Args:
      kind: the configuration's class. values: what was read. source: where it was read, for the error.

    Raises:
      UserError: a field or mechanism that this version doesn't know, or a value out of range.
    """
    return _from_json(kind, values, source, "")


def _from_json(kind: Any, values: Any, source: str, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: {path or 'the file'} must be an object, got {values!r}")
    values = dict(values)
    if issubclass(kind, Mechanism):
        name = values.pop("name", None)
        if name not in MECHANISMS:
            raise UserError(f"{source}: {path}.name: expected one of {', '.join(MECHANISMS)}, got {name!r}")
        kind = MECHANISMS[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in fields]
    if unknown:
        where = _join(path, unknown[0])
        raise UserError(f"{source}: unknown field {where}; this version knows {', '.join(fields)}")
    for name, value in values.items():
        part = part_of(hints[name])
        if part is not None and not (value is None and type(None) in typing.get_args(hints[name])):
            values[name] = _from_json(part, value, source, _join(path, name))
        elif isinstance(value, list) and hints[name] not in (int, float, bool, str):
            values[name] = tuple(value)
        elif not _fits(value, hints[name]):
            where = _join(path, name)
            raise UserError(f"{source}: {where} must be {hints[name].__name__}, got {value!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source}: {path or kind.__name__}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of a field's plain type; types that are not plain are left to the dataclass's checks."""
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint not in (bool, str) or isinstance(value, hint)


def _join(*path: str) -> str:
    return ".".join(filter(None, path))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as one, their keys joined by dots; tuples are lists, as in JSON."""
    flat = traverse_util.flatten_dict(dict(values), sep=".")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """Fields, as "name old -> new", that keep a run of `old` from being resumed as `new` (both from `to_json`).

    Args:
      free: dotted names of the fields that may differ (`train.fields.Free`), or of whole parts.
    """
    old_flat, new_flat = flatten(old), flatten(new)
    missing = object()
    return [
        f"{option_name(name)} {old_flat.get(name, 'absent')} -> {new_flat.get(name, 'absent')}"
        for name in old_flat | new_flat
        if old_flat.get(name, missing) != new_flat.get(name, missing)
        and not any(name == other or name.startswith(f"{other}.") for other in free)
    ]


def option_name(path: str) -> str:
    """The command line's name of the field with this dotted name."""
    part, dot, name = path.partition(".")
    return name if dot and part in _FLAT_PARTS else path


def write_json(values: Mapping[str, Any], path: epath.Path) -> None:
    """Writes a configuration (from `to_json`) under another name and renames it: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(values, indent=2) + "\n")
    aside.replace(path)


def read_values(path: str | os.PathLike[str]) -> Any:
    """The JSON that `write_json` wrote.

    Raises:
      UserError: there is no such file, or it is not JSON.
    """
    try:
        return json.loads(epath.Path(path).read_text())
    except FileNotFoundError as error:
        raise UserError(f"--workdir: no run there: {os.fspath(path)} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{os.fspath(path)}: cannot be read: {error}") from error
