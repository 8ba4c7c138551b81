"""Reads and writes folders with safetensors and a config.json."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from brl_jax import json_files

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.model.base64",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "characters.json",
    "chat_template.jinja",
)
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
GENERATION = "generation_config.json"
_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


def safetensors_numpy() -> Any:
    """Returns the module `safetensors.numpy`.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("reading and writing safetensors needs: pip install 'brl-jax[hf]'") from error
    return safetensors.numpy


def read_json(path: Path) -> dict[str, Any]:
    """Reads an object from a JSON file.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file does not hold an object.
    """
    try:
        return json_files.read_json(path, dict)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no {path.name} in {path.parent}") from error


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]]:
    """Yields the shapes of a folder's tensors by name, from one file or from the shards of an index, and a function
    that reads one of them.

    Raises:
      FileNotFoundError: the folder has neither file, or a shard is missing.
      ValueError: a file is damaged.
    """
    safetensors_numpy()
    from safetensors import SafetensorError, safe_open

    with contextlib.ExitStack() as stack:

        def open_file(name: str) -> Any:
            path = folder / name
            if not path.is_file():
                raise FileNotFoundError(f"{folder / INDEX} names {name}, which is missing")
            try:
                return stack.enter_context(safe_open(path, framework="np"))
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from error

        def shape_of(file: Any, name: str) -> tuple[int, ...]:
            try:
                stored = file.get_slice(name)
                if (dtype := stored.get_dtype()) not in _DTYPES:
                    raise ValueError(
                        f"{name} is stored as {dtype}; weights must be of {', '.join(sorted(_DTYPES))}"
                    )
                return tuple(stored.get_shape())
            except SafetensorError as error:
                raise ValueError(
                    f"{folder / INDEX} names another file for {name} than holds it: {error}"
                ) from error

        if (folder / WEIGHTS).is_file():
            file = open_file(WEIGHTS)
            names = file.keys()
            yield {name: shape_of(file, name) for name in names}, file.get_tensor
            return
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(f"no {WEIGHTS} and no {INDEX} in {folder}")
        shard_of = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shard_of, dict):
            raise ValueError(f"{folder / INDEX} must have an object weight_map")
        for name in shard_of.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{folder / INDEX} must name files beside it, got {name!r}")
        shards = {name: open_file(name) for name in sorted(set(shard_of.values()))}
        yield (
            {name: shape_of(shards[shard], name) for name, shard in shard_of.items()},
            lambda name: shards[shard_of[name]].get_tensor(name),
        )


def metadata(folder: Path) -> dict[str, str]:
    """Returns the metadata of a folder's weights; empty if they are in shards."""
    safetensors_numpy()
    from safetensors import safe_open

    if not (folder / WEIGHTS).is_file():
        return {}
    with safe_open(folder / WEIGHTS, framework="np") as file:
        return file.metadata() or {}


def write_folder(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    metadata: Mapping[str, str],
    tokenizer: str | os.PathLike[str] | None = None,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes weights, config.json and a tokenizer's files into a new folder, which appears once it is complete.

    Args:
      more: other JSON files, contents by name.
      tokenizer: a folder; its files with the usual tokenizer names are copied.

    Raises:
      FileExistsError: the folder exists and is not empty.
      OSError: a file cannot be written.
    """
    save_file = safetensors_numpy().save_file
    from safetensors import SafetensorError

    target = Path(path).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not empty; give the name of a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        try:
            save_file(dict(tensors), partial / WEIGHTS, metadata=dict(metadata))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        for name, values in {CONFIG: config, **more}.items():
            (partial / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        source = None if tokenizer is None else Path(tokenizer)
        for name in TOKENIZER_FILES:
            if source is not None and (source / name).is_file():
                shutil.copy(source / name, partial / name)
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)  # mkdtemp makes folders that only their owner can read
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
