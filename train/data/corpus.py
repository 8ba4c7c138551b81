"""Tokens of a text on disk: made once, a piece at a time, then read through a memory map.

The file is a flat .npy array, not ArrayRecord: a batch of 16 rows of 512 tokens at random places takes 14 us from the
memory map and 288 us from ArrayRecord (20 million tokens, one record a row, warm cache), and a row may begin anywhere.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from brl_jax.json_files import read_json
from train.data.files import npy_file
from train.data.splits import Split
from train.data.tokenizers.base import Tokenizer
from train.data.tokenizers.pieces import Part, text_pieces
from train.engine.errors import UserError
from train.engine.metrics import tracked
from train.engine.storage import writing

_COUNT_BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The tokens of one split.

    tokens: (N,) uint8, uint16 or int32, one text after the other. token_bytes: (vocab,) int64, the bytes of text that a
    token encodes. extra: (k, 2) int64, rows (position, bytes beyond token_bytes there), by position.
    digest: hash of the tokens and the weights. starts: (D,) int64, the positions at which documents start, ascending
    from 0; by default all is one document. weights: (k, 2) float64, rows (position, how much tokens from there on count
    in the loss), by position; before the first row tokens count 1.
    """

    tokens: Int[np.ndarray, " N"]
    token_bytes: Int[np.ndarray, " vocab"]
    extra: Int[np.ndarray, "k 2"]
    digest: str
    starts: Int[np.ndarray, " D"] = dataclasses.field(default_factory=lambda: np.zeros(1, np.int64))
    weights: Float[np.ndarray, "k 2"] = dataclasses.field(default_factory=lambda: np.zeros((0, 2)))

    @property
    def is_weighted(self) -> bool:
        """Whether some tokens count more in the loss than others."""
        return len(self.weights) > 0

    def weights_at(self, at: Int[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """The weights of the tokens at these positions, which wrap around at the end, in float32."""
        rows = np.searchsorted(self.weights[:, 0], at % len(self.tokens), side="right")
        return np.concatenate([[1.0], self.weights[:, 1]]).astype(np.float32)[rows]

    def counted(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of [start, stop) whose tokens have a weight above 0."""
        inside = self.weights[(self.weights[:, 0] > start) & (self.weights[:, 0] < stop), 0].astype(np.int64)
        ends = [start, *inside.tolist(), stop]
        for low, high, weight in zip(ends, ends[1:], self.weights_at(np.array(ends[:-1]))):
            if weight > 0:
                yield low, high

    def segment_ids(self, at: Int[np.ndarray, " R"], length: int) -> Int[np.ndarray, "R T"]:
        """Which document of its row each token is of, from 0 on, for rows of `length` tokens from positions `at` in
        [0, N) on, which go on at 0 where the text ends."""
        begins = np.zeros((len(at), length), np.int32)
        size = len(self.tokens)
        for row, start in zip(begins, at.tolist()):
            for first, end, shift in (
                (start + 1, start + length, -start),
                (0, start + length - size, size - start),
            ):
                low, high = np.searchsorted(self.starts, (first, end))
                row[self.starts[low : max(low, high)] + shift] = 1
        return np.cumsum(begins, axis=1, dtype=np.int32)

    def num_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """Bytes of the original text that tokens[start:stop] encode, unknown words included."""
        start, stop, _ = slice(start, stop).indices(len(self.tokens))
        total = 0
        for low in range(start, stop, _COUNT_BLOCK):
            counts = np.bincount(
                self.tokens[low : min(low + _COUNT_BLOCK, stop)], minlength=len(self.token_bytes)
            )
            total += int(counts @ self.token_bytes)
        # Not np.searchsorted, which would copy the column out of the memory map.
        first, last = (bisect.bisect_left(self.extra[:, 0], at) for at in (start, stop))
        return total + int(self.extra[first:last, 1].sum())


def reading(
    title: str, split: Split, *, by_document: bool
) -> contextlib.closing[Generator[bytes, None, None]]:
    """A context with the split's text as `text_pieces`, of one document each or as if all were one, whose progress is
    shown."""
    blocks = split.blocks() if by_document else map(bytes, split.blocks())
    pieces = ((piece, len(piece)) for piece in text_pieces(blocks))
    return contextlib.closing(tracked(pieces, split.size, title, in_bytes=True))


def open_corpus(folder: Path, name: str, split: Split, tokenizer: Tokenizer) -> Corpus:
    """The tokens of `split` in folder/name.npy, which is made if it does not exist.

    Making it takes the memory of a few pieces of text only. Each file (`corpus_files`) is written under another name
    and renamed, name.json last, so that a folder with it has all of the corpus.

    Raises:
      UserError: the text is empty or cannot be read as the tokenizer needs it.
      OSError: the folder cannot be written.
    """
    corpus = read_corpus(folder, name, tokenizer)
    if corpus is None:
        _build(folder, name, split, tokenizer)
        corpus = read_corpus(folder, name, tokenizer)
        if corpus is None:
            raise OSError(f"{folder / name}.npy is not what was written to it")
    return corpus


def read_corpus(folder: Path, name: str, tokenizer: Tokenizer) -> Corpus | None:
    """The corpus that `open_corpus` made, memory-mapped; None if it does not exist or is damaged."""
    try:
        summary = read_json(folder / f"{name}.json", {"tokens": int, "digest": str})
        tokens, extra, starts, weights = (
            np.load(folder / file, mmap_mode="r").view(np.ndarray) for file in corpus_files(name)[:-1]
        )
    except (OSError, ValueError, EOFError):
        return None
    if tokens.shape != (summary["tokens"],) or tokens.dtype != tokenizer.dtype:
        return None
    return Corpus(tokens, tokenizer.token_bytes, extra, summary["digest"], starts, weights)


def corpus_files(name: str) -> list[str]:
    """The names of a corpus's files, in the order in which they are written."""
    return [f"{name}{end}" for end in (".npy", ".extra.npy", ".starts.npy", ".weights.npy", ".json")]


def _build(folder: Path, name: str, split: Split, tokenizer: Tokenizer) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    count, digest = 0, hashlib.sha256()
    is_start = True  # a document has started that has no tokens yet
    weights: list[tuple[int, float]] = []
    with writing(*(folder / file for file in corpus_files(name))) as files:
        with (
            npy_file(files[0], tokenizer.dtype) as add_tokens,
            npy_file(files[1], np.int64, 2) as add_extra,
            npy_file(files[2], np.int64) as add_starts,
            reading(f"tokens of {name}", split, by_document=True) as pieces,
        ):
            for encoded in tokenizer.encode_corpus(pieces):
                ids, extra, piece = encoded
                is_start |= encoded.starts
                if isinstance(piece, Part) and piece.weight != (weights[-1][1] if weights else 1.0):
                    weights.append((count, piece.weight))
                if is_start and len(ids):
                    add_starts(np.array([count]))
                    is_start = False
                digest.update(add_tokens(ids))
                add_extra(extra + np.array([[count, 0]]))
                count += len(ids)
        weighted = np.array(weights, np.float64).reshape(-1, 2)
        with npy_file(files[3], np.float64, 2) as add_weights:
            digest.update(add_weights(weighted))
        if not count:
            raise UserError(f"--data: the {name} text is empty")
        files[4].write_text(json.dumps({"tokens": count, "digest": digest.hexdigest()}) + "\n")
