"""Where the documents of a text start, for texts that hold many without saying so: --documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from train.data.tokenizers.pieces import DocumentStart
from train.engine.errors import UserError

RECORDS = "records"
_WIKITEXT = "wikitext"
# A line that is longer than this is not a heading and passes unchanged.
_LONGEST = 1 << 20

FirstLine = Callable[[bytes, bytes, bytes], bool]
"""Whether a line starts a document, from the line, the one before it and the one after it, without their ends."""


def check_documents(spec: str) -> FirstLine | None:
    """How the lines that start a document are recognised; None if the source's records are the documents.

    Args:
      spec: "records"; "wikitext", for lines ` = Title = ` between empty lines, with one mark on each side, as sections
        have more; or a regular expression that matches all of such a line.
    """
    if spec == RECORDS:
        return None
    try:
        pattern = re.compile(r" = [^=]+ = *" if spec == _WIKITEXT else spec)
    except re.error as error:
        raise UserError(
            f"--documents: expected {RECORDS}, {_WIKITEXT} or a regular expression, got {spec!r}: {error}"
        ) from error
    # WikiText's tables, formulas and lists have such lines too, but not between empty ones.
    between_empty = spec == _WIKITEXT

    def is_first(line: bytes, before: bytes, after: bytes) -> bool:
        if between_empty and (before.strip() or after.strip()):
            return False
        return pattern.fullmatch(line.decode(errors="replace")) is not None

    return is_first


def cut_documents(blocks: Iterable[bytes], *, first_line: FirstLine, keep: bool) -> Iterator[bytes]:
    """The blocks' text, with a document wherever `first_line` says so.

    Empty lines in front of a document's first line belong to it unless another document precedes them.

    Args:
      keep: whether the documents of the blocks start there too.
    """
    kind: type[bytes] = DocumentStart  # of the next block
    pending = b""  # lines that have not been looked at
    before = b""  # the line before them
    is_empty = True  # whether the document has empty lines only
    inside = False  # whether `pending` goes on with a line whose beginning was too long to keep

    def cut(text: bytes, *, is_last: bool) -> Iterator[bytes]:
        """Gives the lines whose next line is there too, or all, and keeps the rest."""
        nonlocal kind, pending, before, is_empty, inside
        start = at = 0
        while at < len(text):
            end = text.find(b"\n", at)
            stop = text.find(b"\n", end + 1) if end >= 0 else -1
            if stop < 0 and not is_last and len(text) - at <= _LONGEST:
                break
            is_whole = end >= 0 or is_last
            end = end if end >= 0 else len(text)
            stop = stop if stop >= 0 else len(text)
            line = text[at:end]
            is_first = not (is_empty or inside or not is_whole)
            if is_first and first_line(line.removesuffix(b"\r"), before, text[end + 1 : stop]):
                if at > start:
                    yield kind(text[start:at])
                start, kind = at, DocumentStart
            is_empty = is_empty and not line.strip()
            if not (inside and before.strip()):
                before = line
            inside, at = not is_whole, min(end + 1, len(text))
        if at > start:
            yield kind(text[start:at])
            kind = bytes
        pending = text[at:]

    for block in blocks:
        if keep and isinstance(block, DocumentStart):
            yield from cut(pending, is_last=True)
            kind, before, is_empty, inside = DocumentStart, b"", True, False
        yield from cut(pending + block, is_last=False)
    yield from cut(pending, is_last=True)
