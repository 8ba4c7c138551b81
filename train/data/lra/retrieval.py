"""Pairs of documents as bytes: the Long Range Arena's AAN (does one paper cite the other?), or passages of novels (are
they by the same author?) for those who do not have it."""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from train.data.examples import Source, digest
from train.data.files import (
    file_stats,
    find_file,
    numbered_lines,
    packed_or_not,
    parsed,
    read_whole,
    shown,
    split_files,
)
from train.engine.errors import UNREADABLE, UserError, one_line

NUM_CLASSES = 2
_AAN_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "valid": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}


def open_files(folder: Path, seed: int, sizes: dict[str, int]) -> Source | None:
    """AAN's .tsv files in a folder or its tsv_data; else pairs of passages from the books that books.tsv lists there.

    None if there are neither.
    """
    for place in (folder, folder / "tsv_data"):
        paths = split_files(place, _AAN_FILES)
        if paths is not None:
            splits = {split: functools.partial(_read_aan, path) for split, path in paths.items()}
            return Source(f"AAN pairs of {place}", digest("aan", file_stats(paths.values())), splits)
    table = find_file(folder / "books.tsv")
    return None if table is None else _open_books(table, seed, sizes)


def _parse_aan(line: bytes) -> tuple[bytes, bytes, int]:
    """Both texts and the label of a line; raises ValueError if it is malformed."""
    columns = line.split(b"\t")
    if len(columns) != 5:
        raise ValueError(f"expected 5 columns (label, id, id, text, text), got {len(columns)}")
    if columns[0] not in (b"0", b"1", b"0.0", b"1.0"):
        raise ValueError(f"expected a label of 0 or 1, got {shown(columns[0])}")
    return columns[3], columns[4], int(float(columns[0]))


def _read_aan(path: Path) -> Iterator[tuple[bytes, bytes, int]]:
    return parsed(path, numbered_lines(path), _parse_aan)


# --- passages of novels ---

# The author of each book, by its number at Project Gutenberg.
_AUTHORS = {
    98: "Dickens", 766: "Dickens", 1400: "Dickens",
    145: "Eliot", 507: "Eliot", 6688: "Eliot",
    158: "Austen", 1342: "Austen",
    1260: "C. Bronte", 9182: "C. Bronte",
    107: "Hardy", 153: "Hardy",
    155: "Collins", 583: "Collins",
    345: "Stoker", 599: "Thackeray", 768: "E. Bronte", 1257: "Dumas",
    2432: "Trollope", 2554: "Dostoevsky", 2701: "Melville", 4276: "Gaskell",
}  # fmt: skip
_PASSAGE = 4000
# The splits' shares of each book, from its beginning.
_SHARES = {"train": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}


def _open_books(table: Path, seed: int, sizes: dict[str, int]) -> Source:
    folder = table.parent
    files = {split: packed_or_not(folder / f"{split}.txt") for split in _SHARES}
    stats = file_stats([table, *files.values()])
    splits = {
        split: functools.partial(_draw_pairs, table, files, split, [seed, number], sizes[split])
        for number, split in enumerate(_SHARES)
    }
    return Source(
        f"pairs of passages from the novels of {folder} (same author or not)",
        digest("novels", stats, seed, sizes),
        splits,
    )


def _books(table: Path, files: dict[str, Path]) -> dict[str, list[bytes]]:
    """The texts of each author's books."""
    try:
        texts = {split: read_whole(path) for split, path in files.items()}
        rows = list(csv.DictReader(read_whole(table).decode().splitlines(), delimiter="\t"))
        by_author: dict[str, list[bytes]] = {}
        for row in rows:
            start, size = int(row["offset_bytes"]), int(row["length_bytes"])
            author = _AUTHORS.get(int(row["repo"].rpartition("_")[2]))
            if author is None:
                raise UserError(f"--data_dir: {table}: the author of {row['repo']} is not known")
            by_author.setdefault(author, []).append(texts[row["split"]][start : start + size])
    except (*UNREADABLE, KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"--data_dir: the books of {table.parent} cannot be read: {one_line(error)}"
        ) from error
    return by_author


def _draw_pairs(
    table: Path, files: dict[str, Path], split: str, seed: list[int], count: int
) -> Iterator[tuple[bytes, bytes, int]]:
    """Pairs of passages from each book's share for the split, half of them by one author.

    An author with several books gives passages of two of them, one with a single book two passages of it; in
    the long run every author is as often in pairs of either kind.
    """
    low, high = _SHARES[split]
    authors = sorted(_books(table, files).items())
    rng = np.random.default_rng(seed)

    def passage(author: int, book: int) -> bytes:
        books = authors[author][1]
        text = books[book % len(books)]
        start = rng.integers(
            int(low * len(text)), max(int(high * len(text)) - _PASSAGE, int(low * len(text)) + 1)
        )
        return text[start : start + _PASSAGE]

    for number in range(count):
        same = number % 2
        first, other = rng.choice(len(authors), 2, replace=False)
        book = int(rng.integers(len(authors[first][1])))
        yield passage(first, book), passage(first if same else other, book + 1), same
