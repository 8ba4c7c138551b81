"""Builds command lines for tests."""

from collections.abc import Sequence
from typing import Any

from train.cli.options import parse


def last_wins(line: str | Sequence[str]) -> list[str]:
    """The words of a command line in which a repeated option keeps only its last value: commands refuse repetitions,
    and tests override options of a common line."""
    words = _words(line)
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    first = starts[0] if starts else len(words)
    groups: dict[str, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], len(words)]):
        name = words[start].split("=")[0].replace("-", "_")
        groups.pop(name, None)
        groups[name] = words[start:end]
    return [*words[:first], *(word for group in groups.values() for word in group)]


def config_of(task: Any, line: str | Sequence[str] = "", preset: str | None = None) -> Any:
    """What a task's command line asks for; `preset` is the default one of the task unless given."""
    return parse(task.presets, preset or task.default_preset, _words(line), prog="", about="")


def _words(line: str | Sequence[str]) -> list[str]:
    return line.split() if isinstance(line, str) else list(line)
