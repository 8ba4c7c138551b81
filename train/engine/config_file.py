"""The config.json of a run: writing it, reading it back, and comparing it with another."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath
from flax import traverse_util

from brl_jax.json_files import read_json
from train.engine.errors import UserError, reason
from train.engine.storage import as_os_errors, write_whole

# Parts of a configuration whose fields are options without a prefix.
_FLAT_PARTS = ("loop", "data", "model", "optimizer")


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries as one, their keys joined by dots; tuples are lists, as in JSON."""
    flat = traverse_util.flatten_dict(dict(values), sep=".")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """Fields, as "name old -> new", that keep a run of `old` from being resumed as `new`. Of a part with another "name"
    there is the name alone.

    Args:
      free: dotted names of the fields that may differ (`train.engine.fields.Free`), or of whole parts.
    """
    old_flat, new_flat = flatten(old), flatten(new)
    missing = object()
    for path in [name for name in old_flat | new_flat if name.endswith(".name")]:
        if old_flat.get(path) != new_flat.get(path):
            old_flat, new_flat = (_with_name_alone(flat, path) for flat in (old_flat, new_flat))
    return [
        f"{option_name(name)} {_short(old_flat.get(name, 'absent'))} -> {_short(new_flat.get(name, 'absent'))}"
        for name in old_flat | new_flat
        if old_flat.get(name, missing) != new_flat.get(name, missing)
        and not any(name == other or name.startswith(f"{other}.") for other in free)
    ]


def _with_name_alone(flat: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Flat fields, in which the name of a part, which is at `path`, replaces the part."""
    part = path.removesuffix(".name")
    return {
        part if name == path else name: value
        for name, value in flat.items()
        if name == path or not name.startswith(f"{part}.")
    }


def _short(value: Any) -> Any:
    """The value, or a few items of a long list."""
    return reprlib.repr(value) if isinstance(value, list) else value


def option_name(path: str) -> str:
    """The command line's name of the field with this dotted name."""
    part, dot, name = path.partition(".")
    return name if dot and part in _FLAT_PARTS else path


def write_json(values: Mapping[str, Any], path: epath.Path) -> None:
    """Writes a configuration. The file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(values, indent=2) + "\n")


def read_values(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A run's config.json: its task and the parts of its configuration."""
    try:
        with as_os_errors():
            return read_json(epath.Path(path), {"task": str})
    except FileNotFoundError as error:
        raise UserError(f"--workdir: no run there: {os.fspath(path)} is missing") from error
    except OSError as error:
        raise UserError(f"--workdir: {os.fspath(path)} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise UserError(f"--workdir: {error}") from error
