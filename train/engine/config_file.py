"""Configurations as JSON: writing them, reading them back, and comparing a run's with another."""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from etils import epath
from flax import traverse_util

from brl_jax.configuration import configuration
from brl_jax.json_files import read_json
from brl_jax.layers import MECHANISMS, Mechanism
from train.engine.errors import UserError, reason
from train.engine.fields import Mark, marked
from train.engine.storage import as_os_errors, write_whole

T = TypeVar("T")

# Parts of a configuration whose fields are options without a prefix.
_FLAT_PARTS = ("loop", "data", "model", "optimizer")


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


def from_json(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """The configuration that `to_json` wrote; missing fields have their defaults.

    Args:
      kind: the configuration's class. values: what was read. source: where it was read, for the error.

    Raises:
      UserError: a field or mechanism that this version doesn't know, or a value out of range.
    """
    try:
        return configuration(kind, values)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as one, their keys joined by dots; tuples are lists, as in JSON."""
    flat = traverse_util.flatten_dict(dict(values), sep=".")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """Fields, as "name old -> new", that keep a run of `old` from being resumed as `new` (both from `to_json`). Of
    another mechanism there is the name alone.

    Args:
      free: dotted names of the fields that may differ (`train.engine.fields.Free`), or of whole parts.
    """
    old_flat, new_flat = flatten(old), flatten(new)
    missing = object()
    for path in [name for name in old_flat | new_flat if name.endswith("mechanism.name")]:
        if old_flat.get(path) != new_flat.get(path):
            old_flat, new_flat = (_with_name_alone(flat, path) for flat in (old_flat, new_flat))
    return [
        f"{option_name(name)} {_short(old_flat.get(name, 'absent'))} -> {_short(new_flat.get(name, 'absent'))}"
        for name in old_flat | new_flat
        if old_flat.get(name, missing) != new_flat.get(name, missing)
        and not any(name == other or name.startswith(f"{other}.") for other in free)
    ]


def _with_name_alone(flat: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Flat fields with a part's name, which is at `path`, in place of the part."""
    part = path.removesuffix(".name")
    return {
        part if name == path else name: value
        for name, value in flat.items()
        if name == path or not name.startswith(f"{part}.")
    }


def _short(value: Any) -> Any:
    """The value, or a few items of a long list."""
    return reprlib.repr(value) if isinstance(value, list) else value


def changed_options(preset: Any, config: Any, omitted: Collection[str] = ()) -> list[str]:
    """The options of a command line that give a preset the data and the model of another configuration.

    Args:
      preset, config: of the same task, or of two whose data and models have fields in common; only these are compared.
      omitted: dotted names of fields to leave out, in addition to those that a task decides.
    """
    decided = {name for each in (preset, config) for name in marked(type(each), Mark.DECIDED)}
    old, new = (
        flatten({part: to_json(getattr(x, part)) for part in ("data", "model")}) for x in (preset, config)
    )
    words = []
    for path in [name for name in new if name.endswith("mechanism.name")]:
        if new[path] != old.get(path):
            part = path.removesuffix(".name")
            words += [f"--{option_name(part)}", new[path]]
            # Other mechanisms have other fields; the option sets them to their defaults.
            default = to_json(type(getattr(config.model, part.removeprefix("model.")))())
            old |= {f"{part}.{name}": value for name, value in flatten(default).items()}
    for name, value in new.items():
        if name in old and value != old[name] and name not in decided and name not in omitted:
            words += [f"--{option_name(name)}", *map(str, value if isinstance(value, list) else [value])]
    return words


def option_name(path: str) -> str:
    """The command line's name of the field with this dotted name."""
    part, dot, name = path.partition(".")
    return name if dot and part in _FLAT_PARTS else path


def write_json(values: Mapping[str, Any], path: epath.Path) -> None:
    """Writes a configuration (from `to_json`). The file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=2) + "\n")


def read_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A run's config.json: its task and the parts of its configuration.

    Raises:
      UserError: there is no such file, or it holds something else.
    """
    try:
        with as_os_errors():
            return read_json(epath.Path(path), {"task": str})
    except FileNotFoundError as error:
        raise UserError(f"--workdir: no run there: {os.fspath(path)} is missing") from error
    except OSError as error:
        raise UserError(f"--workdir: {os.fspath(path)} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"--workdir: {error}") from error
