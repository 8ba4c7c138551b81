"""Labelled sequences on disk: made once from a source, then read through a memory map."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from brl_jax.json_files import read_json
from train.data.files import SPLIT_OF, npy_file, rows_of
from train.data.named_sources import open_tfds
from train.engine import storage
from train.engine.errors import UserError
from train.engine.metrics import log
from train.engine.storage import writing

# Part of every key: after a change of how sources become tokens, the files of older versions must not be read.
_FORMAT = 1
_ARRAYS = ("tokens", "lengths", "labels")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a task's examples come from.

    name: for messages and tables. fingerprint: changes when the examples do. splits: by name (train, valid, test), a
    function that reads the examples from the start: the bytes of each sequence (two for pairs), and the label.
    """

    name: str
    fingerprint: str
    splits: Mapping[str, Callable[[], Iterator[tuple[Any, ...]]]]


@dataclasses.dataclass(frozen=True)
class Examples:
    """The examples of one split, truncated to the run's length.

    tokens: (sum of lengths,) uint8. lengths: (N, P) int32, at least 1. labels: (N,) int32. truncated: sequences that
    were longer. digest: hash of everything.
    """

    tokens: UInt8[np.ndarray, " total"]
    lengths: Int[np.ndarray, "N P"]
    labels: Int[np.ndarray, " N"]
    truncated: int
    digest: str

    @functools.cached_property
    def _starts(self) -> Int[np.ndarray, " ends"]:
        return np.concatenate([[0], np.cumsum(self.lengths.reshape(-1), dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> list[UInt8[np.ndarray, " length"]]:
        """The P sequences of example `index`."""
        parts, starts = self.lengths.shape[1], self._starts
        return [self.tokens[starts[i] : starts[i + 1]] for i in range(index * parts, (index + 1) * parts)]


def tfds_source(name: str, read: Callable[[Any], bytes], *parts: Any) -> Source:
    """Labelled rows of a data set of TensorFlow Datasets; every tenth training row is for validation.

    Args:
      read: the sequence of a row. parts: what else the examples depend on.
    """
    place = f"tfds:{name}"
    sources = open_tfds(f"--data_dir (none, so {place})", name)

    def rows(split: str) -> Iterator[tuple[bytes, int]]:
        source: Any = sources[SPLIT_OF[split]]
        for i in rows_of(len(source), split):
            row = source[int(i)]
            yield read(row), int(row["label"])

    counts = {str(name): len(source) for name, source in sources.items()}
    return Source(
        place, digest(place, counts, *parts), {split: functools.partial(rows, split) for split in SPLIT_OF}
    )


def examples_of(pieces: Sequence[np.ndarray], labels: Sequence[int], parts: int, truncated: int) -> Examples:
    """Examples in memory, from their sequences, `parts` of them an example."""
    tokens = np.concatenate([np.zeros(0, np.int32), *pieces])
    lengths = np.array([len(piece) for piece in pieces], np.int32).reshape(-1, parts)
    arrays = tokens, lengths, np.array(labels, np.int32)
    hashed = hashlib.sha256(b"".join(array.tobytes() for array in arrays))
    return Examples(*arrays, truncated, hashed.hexdigest())


def digest(*parts: Any) -> str:
    """Hash of values that JSON can represent."""
    return storage.digest(_FORMAT, *parts)[:16]


def open_examples(
    source: Source, split: str, folder: Path, *, length: int, limit: int, num_classes: int
) -> Examples:
    """The examples of a split, made if folder/SPLIT.json does not exist, and the number of those that were truncated.

    Each file is written under another name and renamed, SPLIT.json last, so that a folder that has it has the whole
    split.

    Args:
      length: tokens kept of a sequence, the first ones; limit: examples kept, the first ones (0: all).
      num_classes: labels must be below.
    """
    examples = _read(folder, split)
    if examples is None:
        _build(source, split, folder, length, limit, num_classes)
        examples = _read(folder, split)
        if examples is None:
            raise OSError(f"{folder / split}.json is not what was written to it")
    if examples.truncated:
        log(
            f"{split}: {examples.truncated} of {examples.lengths.size} sequences were longer than {length}: cut"
        )
    return examples


def _read(folder: Path, split: str) -> Examples | None:
    try:
        summary = read_json(
            folder / f"{split}.json", {"tokens": int, "examples": int, "truncated": int, "digest": str}
        )
        arrays = {
            name: np.load(folder / f"{split}.{name}.npy", mmap_mode="r").view(np.ndarray) for name in _ARRAYS
        }
    except (OSError, ValueError, EOFError):
        return None
    if arrays["tokens"].size != summary["tokens"] or arrays["labels"].size != summary["examples"]:
        return None
    return Examples(**arrays, truncated=summary["truncated"], digest=summary["digest"])


def _build(source: Source, split: str, folder: Path, length: int, limit: int, num_classes: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lengths: list[int] = []
    labels: list[int] = []
    hashed, truncated = hashlib.sha256(), 0
    names = [*(f"{split}.{name}.npy" for name in _ARRAYS), f"{split}.json"]
    with writing(*(folder / name for name in names)) as (
        tokens_file,
        lengths_file,
        labels_file,
        summary_file,
    ):
        with npy_file(tokens_file, np.uint8) as add:
            for *sequences, label in itertools.islice(source.splits[split](), limit or None):
                if not 0 <= label < num_classes:
                    raise UserError(
                        f"--data_dir: {source.name}, {split}: expected labels of 0 to {num_classes - 1}, got {label}"
                    )
                labels.append(label)
                for sequence in sequences:
                    kept = sequence[:length] or b" "  # without a token there is nothing to classify
                    hashed.update(add(np.frombuffer(kept, np.uint8)))
                    lengths.append(len(kept))
                    truncated += len(sequence) > length
        if not labels:
            raise UserError(f"--data_dir: {source.name} has no {split} examples")
        arrays = np.array(lengths, np.int32).reshape(len(labels), -1), np.array(labels, np.int32)
        for path, array in zip((lengths_file, labels_file), arrays):
            hashed.update(array.tobytes())
            with open(path, "wb") as file:
                np.save(file, array)
        summary = {
            "source": source.name,
            "tokens": sum(lengths),
            "examples": len(labels),
            "truncated": truncated,
            "digest": hashed.hexdigest(),
        }
        summary_file.write_text(json.dumps(summary, indent=1) + "\n")
