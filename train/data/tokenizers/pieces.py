"""Text as tokenizers read it: in blocks, which say where parts and documents start, then in pieces of bounded size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from train.engine.errors import UserError

_PIECE = 1 << 20
_SMALL_PIECE, _BATCH_BYTES, _BATCH_PIECES = 1 << 16, 1 << 22, 4096


class Part(bytes):
    """The first bytes of a part of a document, in a text that comes in blocks; blocks that are plain bytes go on with
    it. No token has text of two parts. `weight` is how much a part's tokens count in the loss."""

    weight: float

    def __new__(cls, text: bytes = b"", weight: float = 1.0) -> Self:
        part = super().__new__(cls, text)
        part.weight = weight
        return part


class DocumentStart(Part):
    """The first part of a document."""


class NotUtf8(UserError):
    """Text that a tokenizer cannot read; `train.data.sources.naming_file` says where it is."""


def decode_piece(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise NotUtf8(
            f"--data: the text is not UTF-8 ({piece[error.start : error.start + 8]!r}); "
            "convert it, or use --tokenizer bytes"
        ) from error


def text_pieces(blocks: Iterable[bytes], size: int = _PIECE) -> Iterator[bytes]:
    """The blocks' text in pieces of up to `size` bytes, each cut after a line if possible, else after a blank, else
    after a character, and where a part ends. The first piece of a part is a `Part` with its weight."""
    pending = bytearray()
    kind: Callable[[bytearray], bytes] = bytes
    for block in blocks:
        if isinstance(block, Part):
            if pending:
                yield kind(pending)
            pending, kind = bytearray(), functools.partial(type(block), weight=block.weight)
        pending += block
        start = 0
        while len(pending) - start > size:
            stop = start + size
            cut = pending.rfind(b"\n", start, stop) + 1 or pending.rfind(b" ", start, stop) + 1
            if not cut:
                cut = stop
                while cut > stop - 3 and pending[cut] & 0xC0 == 0x80:
                    cut -= 1
            yield kind(pending[start:cut])
            start, kind = cut, bytes
        del pending[:start]
    if pending:
        yield kind(pending)


def piece_batches(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The pieces in smaller ones, a batch at a time, for a library that spreads a batch over the cores and keeps some
    hundred bytes a token until it is done."""
    batch: list[bytes] = []
    size = 0
    for piece in text_pieces(pieces, _SMALL_PIECE):
        batch.append(piece)
        size += len(piece)
        if len(batch) == _BATCH_PIECES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
