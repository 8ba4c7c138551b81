"""Where the documents of a text start, for texts that hold many without saying so: --documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from train.data.splits import DocumentStart
from train.errors import UserError

RECORDS = "records"
_WIKITEXT = "wikitext"
# A line that is longer than this is no heading: it passes as it comes.
_LONGEST = 1 << 20

FirstLine = Callable[[bytes, bytes], bool]
"""Whether a line, given without its end and after the line before it, starts a document."""


def check_documents(spec: str) -> FirstLine | None:
    """How the lines that start a document are recognised; None where the source's records are the documents.

    Args:
      spec: "records"; "wikitext", for lines ` = Title = ` after an empty line, with one mark on each side, as sections
        have more; or a regular expression that matches all of such a line.

    Raises:
      UserError: the regular expression is none.
    """
    if spec == RECORDS:
        return None
    try:
        pattern = re.compile(r" = [^=]+ = *" if spec == _WIKITEXT else spec)
    except re.error as error:
        raise UserError(
            f"--documents: expected {RECORDS}, {_WIKITEXT} or a regular expression, got {spec!r}: {error}"
        ) from error
    # WikiText's tables and formulas have such lines too, but not after an empty one.
    after_empty = spec == _WIKITEXT

    def is_first(line: bytes, before: bytes) -> bool:
        if after_empty and before.strip():
            return False
        return pattern.fullmatch(line.decode(errors="replace")) is not None

    return is_first


def cut_documents(blocks: Iterable[bytes], *, first_line: FirstLine, keep: bool) -> Iterator[bytes]:
    """The blocks' text, with a document wherever `first_line` says so.

    Empty lines in front of a document's first line belong to it where no other document is before them.

    Args:
      keep: whether the documents of the blocks start there too.
    """
    kind: type[bytes] = DocumentStart  # of the next block
    pending = b""  # the beginning of a line
    before = b""  # the line before it
    is_empty = True  # whether the document has empty lines only

    def starts(line: bytes) -> bool:
        return not is_empty and first_line(line.removesuffix(b"\r"), before)

    for block in blocks:
        if keep and isinstance(block, DocumentStart):
            if pending:
                yield DocumentStart(pending) if starts(pending) else kind(pending)
            kind, pending, before, is_empty = DocumentStart, b"", b"", True
        text = pending + block
        start = at = 0
        while (end := text.find(b"\n", at)) >= 0:
            line = text[at:end]
            if starts(line):
                if at > start:
                    yield kind(text[start:at])
                start, kind = at, DocumentStart
            is_empty = is_empty and not line.strip()
            before, at = line, end + 1
        if len(text) - at > _LONGEST:
            at, before, is_empty = len(text), text[at:], False
        if at > start:
            yield kind(text[start:at])
            kind = bytes
        pending = text[at:]
    if pending:
        yield DocumentStart(pending) if starts(pending) else kind(pending)
