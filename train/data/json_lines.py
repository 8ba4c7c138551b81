"""Documents of files with a JSON object a line: {"text": "...", "weight": 0.5}."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from train.data.splits import DocumentStart, Part
from train.engine.errors import UserError


class Line(NamedTuple):
    """A line of a file, and where it is."""

    address: str
    number: int
    text: bytes


def documents(lines: Iterable[Line]) -> Iterator[Part]:
    """The documents of the lines.

    Raises:
      UserError: a line is not an object with a text; the message has the file and the line.
    """
    for line in lines:
        try:
            yield from _document(line.text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--data: {line.address}, line {line.number}: {error}") from error


def _document(line: bytes) -> Iterator[Part]:
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({line[error.start : error.start + 8]!r})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    weight = _weight(values.get("weight", 1.0))
    text = encoded(values.get("text"), "text")
    yield DocumentStart(text if text.endswith(b"\n") else text + b"\n", weight)


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"weight must be a number of at least 0, got {value!r}")
    return float(value)


def encoded(text: Any, name: str) -> bytes:
    """A field's string in UTF-8. Raises ValueError if it is something else."""
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string, got {text!r}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise ValueError(f"{name} is not UTF-8: {text[error.start : error.end]!r}") from error
