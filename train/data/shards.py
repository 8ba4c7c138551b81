"""Tokens in ArrayRecord shards, as `train.tokenize` writes them: every host reads only the records it needs.

A folder holds tokens.json (what was tokenised, and how), the tokenizer's files, and for each shard
SPLIT-NUMBER.array_record, whose records are `record` tokens each (the last one fewer), and SPLIT-NUMBER.json.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Int

from brl_jax.json_files import read_json
from train.data.corpus import Corpus
from train.data.splits import present
from train.data.tokenizers.base import Tokenizer
from train.data.tokenizers.named import load_tokenizer
from train.engine.errors import UserError, one_line
from train.engine.storage import digest

MANIFEST = "tokens.json"
SHARD = {"tokens": int, "bytes": int, "digest": str, "extra": list[list[int]], "starts": list[int]}
"""What the JSON file of a shard holds."""
# Records that stay in memory. Rows that go on where they stopped read the same record several times.
_KEPT_RECORDS = 1024


class ShardedTokens:
    """The tokens of many shards as one array, (N,), which Grain reads as they are taken.

    Args:
      paths: the shards. counts: their numbers of tokens. record: tokens of a record. dtype: of the tokens.
    """

    def __init__(self, paths: Sequence[Path], counts: Sequence[int], record: int, dtype: np.dtype):
        self.dtype, self._record = dtype, record
        self._source = grain.sources.ArrayRecordDataSource([str(path) for path in paths])
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._first_records = np.concatenate([[0], np.cumsum([-(-count // record) for count in counts])])
        if len(self._source) != self._first_records[-1]:
            raise ValueError(f"{len(self._source)} records, where {self._first_records[-1]} were written")
        self._record_at = functools.lru_cache(_KEPT_RECORDS)(self._read)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, at: Int[np.ndarray, "..."], mode: str = "wrap") -> Int[np.ndarray, "..."]:
        """The tokens at these positions, which wrap around at the end."""
        assert mode == "wrap"
        at = np.asarray(at) % len(self)
        shards = np.searchsorted(self._starts, at, side="right") - 1
        within = at - self._starts[shards]
        records = self._first_records[shards] + within // self._record
        found, which = np.unique(records, return_inverse=True)
        tokens = np.zeros((len(found), self._record), self.dtype)
        for row, index in zip(tokens, found.tolist()):
            record = self._record_at(index)
            row[: len(record)] = record
        return tokens[which.reshape(at.shape), within % self._record]

    def __getitem__(self, part: slice) -> Int[np.ndarray, " n"]:
        start, stop, step = part.indices(len(self))
        return self.take(np.arange(start, stop, step))

    def _read(self, index: int) -> np.ndarray:
        return np.frombuffer(self._source[index], self.dtype)


def open_shards(folder: Path, splits: Sequence[str]) -> tuple[Tokenizer, dict[str, Corpus]]:
    """The tokenizer and the tokens of a folder of shards. Those for training stay on disk; others are read at once."""
    option = f"--data tokens:{folder}"
    try:
        manifest = read_json(folder / MANIFEST, {"splits": dict[str, list[str]], "record": int})
    except (OSError, ValueError) as error:
        raise UserError(
            f"{option}: no tokens there ({one_line(error)}); expected a folder that `python -m train.tokenize` "
            "has finished"
        ) from error
    tokenizer = load_tokenizer(folder)
    wanted = present(splits, manifest["splits"], f"tokens:{folder}")
    return tokenizer, {split: _open_split(option, folder, split, manifest, tokenizer) for split in wanted}


def _inside(folder: Path, name: str) -> Path:
    """The file of that name in the folder. Raises ValueError for a name that leaves it."""
    if Path(name).name != name:
        raise ValueError(f"{folder / MANIFEST}: expected the name of a file in this folder, got {name!r}")
    return folder / name


def _open_split(
    option: str, folder: Path, split: str, manifest: dict[str, Any], tokenizer: Tokenizer
) -> Corpus:
    names = manifest["splits"][split]
    try:
        shards = [read_json(_inside(folder, f"{name}.json"), SHARD) for name in names]
        tokens = ShardedTokens(
            [_inside(folder, f"{name}.array_record") for name in names],
            [shard["tokens"] for shard in shards],
            manifest["record"],
            tokenizer.dtype,
        )
        starts = np.concatenate([[0], np.cumsum([shard["tokens"] for shard in shards])])
        extra = [np.array(shard["extra"], np.int64).reshape(-1, 2) for shard in shards]
        extra = [rows + np.array([[start, 0]]) for rows, start in zip(extra, starts.tolist())]
        begun = [np.array(shard["starts"], np.int64) + start for shard, start in zip(shards, starts.tolist())]
    except (OSError, ValueError, ArithmeticError) as error:
        raise UserError(f"{option}: cannot be read: {one_line(error)}") from error
    # A document without tokens starts where the next one does, or at the end.
    documents = np.unique(np.concatenate([[0], *begun]))
    documents = documents[documents < len(tokens)]
    array: Any = tokens if split == "train" else tokens[:]
    return Corpus(
        array,
        tokenizer.token_bytes,
        np.concatenate(extra),
        digest(*(shard["digest"] for shard in shards)),
        documents,
    )
