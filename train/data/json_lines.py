"""Documents of files with a JSON object a line: {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion":
...}, each with an optional "weight"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brl_jax.json_files import check_json, parse_json
from train.data.tokenizers.chat import ANSWERS, ROLES, ChatTemplate
from train.data.tokenizers.pieces import DocumentStart, Part
from train.engine.errors import UserError

_KINDS = (("text",), ("messages",), ("prompt", "completion"))


class Line(NamedTuple):
    """A line of a file, and where it is."""

    address: str
    number: int
    text: bytes


def documents(lines: Iterable[Line], template: Callable[[], ChatTemplate | None]) -> Iterator[Part]:
    """The documents of the lines. Of a chat only the answers count in the loss."""
    for line in lines:
        place = f"{line.address}, line {line.number}"
        try:
            yield from _document(parse_json(line.text, dict, place), place, template)
        except UserError:  # about the template
            raise
        except ValueError as error:
            raise UserError(f"--data: {error}") from error


def _document(
    values: dict[str, Any], place: str, template: Callable[[], ChatTemplate | None]
) -> Iterator[Part]:
    found = [fields for fields in _KINDS if values.keys() & set(fields)]
    if len(found) != 1:
        raise ValueError(
            f"{place}: expected text, messages, or prompt and completion, got {', '.join(values)}"
        )
    weight = values.get("weight", 1.0)
    check_json(weight, float, f"{place}: weight")
    if weight < 0:
        raise ValueError(f"{place}: weight must be at least 0, got {weight}")
    if "text" in values:
        check_json(values, {"text": str}, place)
        text = values["text"]
        parts = [(text if text.endswith("\n") else text + "\n", True)]
    else:
        messages = _messages(values, place)
        chat = template()
        if chat is None:
            raise ValueError(
                f"{place}: a chat needs a tokenizer with a chat template, as --from_hf FOLDER may have"
            )
        try:
            parts = list(chat.parts(messages))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    kind: type[Part] = DocumentStart
    for text, counts in parts:
        if not text:
            continue
        try:
            yield kind(text.encode(), weight if counts else 0.0)
        except UnicodeEncodeError as error:  # half a surrogate pair
            raise ValueError(f"{place}: not UTF-8: {text[error.start : error.end]!r}") from error
        kind = Part


def _messages(values: Mapping[str, Any], place: str) -> Sequence[Mapping[str, Any]]:
    if "messages" not in values:
        check_json(values, {"prompt": str, "completion": str}, place)
        return [
            {"role": "user", "content": values["prompt"]},
            {"role": ANSWERS, "content": values["completion"]},
        ]
    messages = values["messages"]
    check_json(messages, list[dict], f"{place}: messages")
    for i, message in enumerate(messages):
        name = f"{place}: messages[{i}]"
        check_json(message, {"role": str, "content": str}, name)
        if message["role"] not in ROLES:
            raise ValueError(f"{name}: role must be one of {', '.join(ROLES)}, got {message['role']!r}")
    if not any(message["role"] == ANSWERS for message in messages):
        raise ValueError(f"{place}: messages must have one of the role {ANSWERS}, whose answer is learnt")
    return messages
