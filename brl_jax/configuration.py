"""Configurations as the nested dictionaries of a config.json, and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from brl_jax.fields import complaint_about, part_of
from brl_jax.layers import MECHANISMS, Mechanism

T = TypeVar("T")


def configuration(kind: type[T], values: Any, path: str = "") -> T:
    """Returns the configuration with these values; missing fields keep their defaults.

    Args:
      kind: the configuration's dataclass.
      values: its fields, with nested configurations as dictionaries; a mechanism's dictionary also has its "name" in
        MECHANISMS.
      path: the dotted name of the values in the file, for error messages.

    Raises:
      ValueError: a field or mechanism is unknown to this version, or a value is out of range.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path or 'the file'} must be an object, got {values!r}")
    values = dict(values)
    if issubclass(kind, Mechanism):
        name = values.pop("name", None)
        if name not in MECHANISMS:
            raise ValueError(f"{path}.name: expected one of {', '.join(MECHANISMS)}, got {name!r}")
        kind = MECHANISMS[name]  # type: ignore[assignment]
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind, include_extras=True)
    unknown = [name for name in values if name not in fields]
    if unknown:
        where = _join(path, unknown[0])
        raise ValueError(f"unknown field {where}; this version knows {', '.join(fields)}")
    for name, value in values.items():
        part = part_of(hints[name])
        if part is not None and not (value is None and type(None) in typing.get_args(hints[name])):
            values[name] = configuration(part, value, _join(path, name))
        elif isinstance(value, list) and hints[name] not in (int, float, bool, str):
            values[name] = tuple(value)
        else:
            complaint = complaint_about(value, hints[name])
            if complaint is not None:
                raise ValueError(f"{_join(path, name)} must be {complaint}, got {value!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path or kind.__name__}: {error}") from error


def to_json(config: Any) -> dict[str, Any]:
    """A configuration as nested dictionaries. A mechanism has its fields and its "name" in MECHANISMS.

    Raises:
      ValueError: a mechanism is not listed there, so that no program could read the file.
    """
    values: dict[str, Any] = {}
    if isinstance(config, Mechanism):
        if MECHANISMS.get(config.name) is not type(config):
            raise ValueError(f"{config.name} is not listed in MECHANISMS")
        values["name"] = config.name
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = to_json(value) if dataclasses.is_dataclass(value) else value
    return values


def _join(*path: str) -> str:
    return ".".join(filter(None, path))
