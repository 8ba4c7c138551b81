"""Reads users' files with one-line errors, and writes files and folders that are whole or do not exist."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from brl_jax.json_files import check_regular, parse_json
from train.engine.errors import UNREADABLE, UserError, reason
from train.engine.storage import beside

T = TypeVar("T")

SPLIT_OF = {"train": "train", "valid": "train", "test": "test"}
"""The split from which sources without a validation split take each split."""


def belongs(number: int, split: str) -> bool:
    """Whether row `number` of SPLIT_OF[split] belongs to the split: every tenth training row is for validation."""
    return split == "test" or (number % 10 == 9) == (split == "valid")


def rows_of(count: int, split: str) -> Int[np.ndarray, " rows"]:
    """The rows that belong to the split, of the `count` rows of SPLIT_OF[split]."""
    return np.array([number for number in range(count) if belongs(number, split)], np.int64)


def file_stats(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """What changes when files change: path, size, time."""
    stats = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise UserError(f"--data_dir: expected {path}: {reason(error)}") from error
        stats.append((str(path.resolve()), stat.st_size, stat.st_mtime_ns))
    return stats


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file (.gz too) that are not blank, without their ends, numbered from 1."""
    try:
        check_regular(path)
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except ValueError as error:
        raise UserError(f"--data_dir: {error}") from error
    except UNREADABLE as error:
        raise UserError(f"--data_dir: {path} cannot be read (a truncated file?): {reason(error)}") from error


def parsed(path: Path, lines: Iterable[tuple[int, bytes]], parse: Callable[[bytes], T]) -> Iterator[T]:
    """What `parse` returns for each line. If it raises ValueError, the error names the line."""
    for number, line in lines:
        try:
            yield parse(line)
        except ValueError as error:
            raise UserError(f"--data_dir: {path}, line {number}: {error}") from error


def shown(text: bytes) -> str:
    """The beginning of a line, for an error."""
    return repr(text[:40].decode(errors="replace"))


def labelled_text(line: bytes) -> tuple[str, int]:
    """The text and the label in a line of JSON. Raises ValueError."""
    try:
        row = parse_json(line, {"text": str, "label": int})
        if not 0 <= row["label"] < 2**31:
            raise ValueError(f"label must be at least 0 and below 2^31, got {row['label']}")
    except ValueError as error:
        raise ValueError(f'expected an object with a "text" and a "label" from 0 on: {error}') from error
    return row["text"], row["label"]


def find_file(path: Path) -> Path | None:
    """The file of that path, or else of that path and .gz; None if there is neither."""
    packed = path.with_name(f"{path.name}.gz")
    return next((each for each in (path, packed) if each.is_file()), None)


def packed_or_not(path: Path) -> Path:
    """The file of that path, or else of that path and .gz."""
    found = find_file(path)
    if found is None:
        raise UserError(f"--data_dir: expected {path} or {path.name}.gz; there is neither")
    return found


def read_whole(path: Path) -> bytes:
    """What a file (.gz too) contains."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def split_files(folder: Path, names: Mapping[str, str]) -> dict[str, Path] | None:
    """The files of all splits in a folder by their names, each of them `packed_or_not`; None if all are missing."""
    paths = {split: folder / name for split, name in names.items()}
    if not any(map(find_file, paths.values())):
        return None
    return {split: packed_or_not(path) for split, path in paths.items()}


@contextlib.contextmanager
def npy_file(path: Path, dtype: Any, *columns: int) -> Iterator[Callable[[np.ndarray], bytes]]:
    """A function that adds rows to a new .npy file, and returns their bytes."""
    count = 0

    def write_header() -> None:  # of the same length whatever the number of rows
        file.seek(0)
        described = np.lib.format.dtype_to_descr(np.dtype(dtype))
        header = {"descr": described, "fortran_order": False, "shape": (count, *columns)}
        np.lib.format.write_array_header_1_0(file, header)

    def add(rows: np.ndarray) -> bytes:
        nonlocal count
        # Unlike write, ndarray.tofile does not say why it fails.
        file.write(content := rows.tobytes())
        count += len(rows)
        return content

    with open(path, "wb") as file:
        write_header()
        yield add
        write_header()


@contextlib.contextmanager
def writing_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder to write in, renamed to `out` once all is written; after an error nothing is left."""
    target = Path(out)
    if target.exists():
        raise UserError(f"--out: {target} is there already; expected the name of a new folder")
    aside = beside(target)
    try:
        aside.mkdir(parents=True)
        yield aside
        aside.rename(target)
    except OSError as error:
        raise UserError(f"--out: cannot write {target}: {reason(error)}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
