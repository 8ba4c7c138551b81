"""Documents of files with a JSON object a line: {"text": "...", "weight": 0.5}."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from brl_jax.json_files import check_json, parse_json
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
        place = f"{line.address}, line {line.number}"
        try:
            yield from _document(parse_json(line.text, dict, place), place)
        except ValueError as error:
            raise UserError(f"--data: {error}") from error


def _document(values: dict[str, Any], place: str) -> Iterator[Part]:
    check_json(values, {"text": str}, place)
    weight = values.get("weight", 1.0)
    check_json(weight, float, f"{place}: weight")
    if weight < 0:
        raise ValueError(f"{place}: weight must be at least 0, got {weight}")
    try:
        text = values["text"].encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise ValueError(f"{place}: text is not UTF-8") from error
    yield DocumentStart(text if text.endswith(b"\n") else text + b"\n", weight)
