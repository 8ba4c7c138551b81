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
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from etils import epath
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from brl_jax.json_files import read_json
from train.data.files import npy_header
from train.data.splits import Part, Split
from train.data.tokenizers.base import Tokenizer, text_pieces
from train.engine.errors import UserError
from train.engine.storage import beside

# A progress bar appears where making a corpus takes longer than this.
_QUIET_SECONDS = 1.0
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


@contextlib.contextmanager
def reading(title: str, split: Split, *, by_document: bool) -> Iterator[Iterator[bytes]]:
    """The split's text as `text_pieces`, of one document each or as if all were one, with a progress bar on stderr (a
    line if that is not a terminal) once it takes longer than a second."""
    started, shown = time.monotonic(), False
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

    def pieces() -> Iterator[bytes]:
        nonlocal shown
        task = progress.add_task(title, total=split.size)
        for piece in text_pieces(split.blocks() if by_document else map(bytes, split.blocks())):
            yield piece
            progress.advance(task, len(piece))
            if not shown and time.monotonic() - started > _QUIET_SECONDS:
                shown = True
                if console.is_interactive:
                    progress.start()
                else:
                    console.print(title, markup=False)

    try:
        yield pieces()
    finally:
        if progress.live.is_started:  # for a bar that never started, rich would print an empty line
            progress.stop()


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
    paths = [folder / file for file in corpus_files(name)]
    asides = {path: Path(beside(epath.Path(path))) for path in paths}
    tokens_file, extra_file, starts_file, weights_file, summary_file = asides.values()
    try:
        count, extra_count, starts_count, digest, int64 = 0, 0, 0, hashlib.sha256(), np.dtype(np.int64)
        is_start = True  # a document has started that has no tokens yet
        weights: list[tuple[int, float]] = []
        with (
            open(tokens_file, "wb") as tokens,
            open(extra_file, "wb") as extras,
            open(starts_file, "wb") as starts,
            reading(f"tokens of {name}", split, by_document=True) as pieces,
        ):
            tokens.write(npy_header(tokenizer.dtype, (0,)))
            extras.write(npy_header(int64, (0, 2)))
            starts.write(npy_header(int64, (0,)))
            for encoded in tokenizer.encode_corpus(pieces):
                ids, extra, piece = encoded
                is_start |= encoded.starts
                if isinstance(piece, Part) and piece.weight != (weights[-1][1] if weights else 1.0):
                    weights.append((count, piece.weight))
                if is_start and len(ids):
                    starts.write(np.int64(count).tobytes())
                    starts_count += 1
                    is_start = False
                # Unlike write, ndarray.tofile does not say why it fails.
                tokens.write(written := ids.tobytes())
                digest.update(written)
                extras.write((extra + np.array([[count, 0]])).tobytes())
                count += len(ids)
                extra_count += len(extra)
            tokens.seek(0)
            tokens.write(npy_header(tokenizer.dtype, (count,)))
            extras.seek(0)
            extras.write(npy_header(int64, (extra_count, 2)))
            starts.seek(0)
            starts.write(npy_header(int64, (starts_count,)))
        weighted = np.array(weights, np.float64).reshape(-1, 2)
        with open(weights_file, "wb") as file:
            np.save(file, weighted)
        digest.update(weighted.tobytes())
        if not count:
            raise UserError(f"--data: the {name} text is empty")
        summary_file.write_text(json.dumps({"tokens": count, "digest": digest.hexdigest()}) + "\n")
        for path, aside in asides.items():
            aside.replace(path)
    finally:
        for aside in asides.values():
            aside.unlink(missing_ok=True)
