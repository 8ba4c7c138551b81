"""IMDB reviews as bytes: from TensorFlow Datasets, aclImdb's folders, or {train,test}.jsonl with text and label."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from train.data.examples import Source, digest, tfds_source
from train.data.files import SPLIT_OF, belongs, file_stats, labelled_text, numbered_lines, parsed, split_files
from train.engine.errors import UserError, reason

NUM_CLASSES = 2
_CLASSES = ("neg", "pos")
T = TypeVar("T")


def open_tfds_source() -> Source:
    """IMDB reviews of TensorFlow Datasets."""

    def read(row: Any) -> bytes:
        return row["text"] if isinstance(row["text"], bytes) else row["text"].encode()

    return tfds_source("imdb_reviews", read)


def open_files(folder: Path) -> Source | None:
    """Reviews in a folder: {train,test}.jsonl (or .jsonl.gz), or aclImdb's {train,test}/{pos,neg}/*.txt, in the folder
    or its aclImdb; every tenth training review of each class is for validation. None if there are none.
    """
    paths = split_files(folder, {name: f"{name}.jsonl" for name in ("train", "test")})
    if paths is not None:
        return _source(f"texts of {folder}", file_stats(paths.values()), _read_jsonl, paths)
    for place in (folder, folder / "aclImdb"):
        if (place / "train" / "pos").is_dir():
            files = {name: _review_files(place / name) for name in ("train", "test")}
            stats = [
                [file_stats(path for path, _ in paths), [label for _, label in paths]]
                for paths in files.values()
            ]
            return _source(f"texts of {place}", stats, _read_reviews, files)
    return None


def _source(name: str, stats: Any, read: Callable[..., Any], places: Mapping[str, Any]) -> Source:
    splits = {split: functools.partial(read, places[of], split) for split, of in SPLIT_OF.items()}
    return Source(name, digest("text files by class", name, stats), splits)


def _read_jsonl(path: Path, split: str) -> Iterator[tuple[bytes, int]]:
    rows = parsed(path, numbered_lines(path), labelled_text)
    return _of_split(((text.encode(), label) for text, label in rows), split)


def _of_split(rows: Iterable[tuple[T, int]], split: str) -> Iterator[tuple[T, int]]:
    """The rows and their labels that belong to the split. They are counted by class: where classes alternate, every
    tenth of all rows would be of one of them."""
    counts: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
    return ((row, label) for row, label in rows if belongs(next(counts[label]), split))


def _review_files(folder: Path) -> list[tuple[Path, int]]:
    """The files of both classes, alternating."""
    by_class = [
        [(path, label) for path in sorted((folder / name).glob("*.txt"))]
        for label, name in enumerate(_CLASSES)
    ]
    if not all(by_class):
        raise UserError(f"--data_dir: expected .txt files in {folder}/pos and {folder}/neg")
    return sorted(
        (entry for entries in by_class for entry in entries), key=lambda entry: (entry[0].name, entry[1])
    )


def _read_reviews(files: list[tuple[Path, int]], split: str) -> Iterator[tuple[bytes, int]]:
    for path, label in _of_split(files, split):
        try:
            yield path.read_bytes(), label
        except OSError as error:
            raise UserError(f"--data_dir: cannot read {path}: {reason(error)}") from error
