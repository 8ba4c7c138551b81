"""Builds command lines for tests."""

from collections.abc import Sequence


def last_wins(line: str | Sequence[str]) -> list[str]:
    """The words of a command line in which a repeated option keeps only its last value: commands refuse repetitions,
    and tests override options of a common line."""
    words = line.split() if isinstance(line, str) else list(line)
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    first = starts[0] if starts else len(words)
    groups: dict[str, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], len(words)]):
        name = words[start].split("=")[0].replace("-", "_")
        groups.pop(name, None)
        groups[name] = words[start:end]
    return [*words[:first], *(word for group in groups.values() for word in group)]
