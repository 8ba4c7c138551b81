"""Texts for tests: their files, corpora in memory, and what damages or fills a disk."""

import contextlib
import gzip
import json
import resource
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.data.corpus import Corpus


def write(path: Path, content: bytes) -> None:
    """Writes a file, compressed if its name ends in .gz."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_splits(folder: Path, both: str = "", **texts: str) -> str:
    """Writes a file for each split, or one text `both` for training and validation; returns the value of --data for
    them."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = texts or {"train": both, "valid": both}
    for split, text in texts.items():
        (folder / f"{split}.txt").write_text(text)
    return f"text:{folder}/*.txt"


def rows_of_json(folder: Path, files: Mapping[str, Sequence[str]]) -> None:
    """Writes files of texts, a JSON object with a text and a number a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in files.items():
        lines = (json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
        (folder / f"{name}.jsonl").write_text("".join(lines))


def corpus_of(tokens: Any, **fields: Any) -> Corpus:
    """A corpus whose tokens are bytes of text."""
    size = max(256, int(np.max(tokens)) + 1)
    given = {"digest": "", "token_bytes": np.ones(size, np.int64), "extra": np.zeros((0, 2), np.int64)}
    return Corpus(tokens, **given | fields)


def numbered(size: int, starts: Any = (0,), **fields: Any) -> Corpus:
    """A corpus whose tokens are their positions."""
    return corpus_of(np.arange(size, dtype=np.int32), starts=np.array(starts), **fields)


def damage(path: Path) -> None:
    """Breaks the first compressed byte of a .gz or .npz file."""
    content, place = bytearray(path.read_bytes()), 10  # after gzip's header
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            place = 30 + len(archive.namelist()[0]) + 20
    content[place] = 7
    path.write_bytes(content)


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """A limit on the size of files plays a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
