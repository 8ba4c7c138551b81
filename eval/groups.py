"""Which runs of a table differ in their seed alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.config_file import flatten
from train.task import Task

Result = Mapping[str, Any]

# Names of places, and the seed.
_NOT_COMPARED = ("loop.seed", "data.data_dir")


def compared(task: Task[Any, Any], config: Any) -> dict[str, Any]:
    """The settings in which runs that are averaged must agree, by dotted name: the steps, and all that a resumed run
    may not change."""
    free = task.free_fields() - {"loop.steps"}
    return {
        name: value
        for name, value in flatten(task.to_json(config)).items()
        if name not in _NOT_COMPARED and not any(name == x or name.startswith(f"{x}.") for x in free)
    }


def alike(results: Sequence[Result], name: Callable[[Result], str]) -> dict[str, list[Result]]:
    """The results of runs that differ in their seed alone, by name; where several groups have one name, it goes on with
    the settings in which they differ.

    Args:
      results: each with "configuration", the `compared` settings of its run. name: what a result's row is called.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        settings = json.dumps(result.get("configuration", {}), sort_keys=True)
        groups.setdefault((name(result), settings), []).append(result)
    named = {}
    for (title, _), runs in groups.items():
        own = runs[0].get("configuration", {})
        others = [other[0].get("configuration", {}) for (one, _), other in groups.items() if one == title]
        fields = sorted({field for other in others for field in other})
        differing = [
            f"{field.rsplit('.', 1)[-1]} {_plain(own.get(field))}"
            for field in fields
            if any(other.get(field) != own.get(field) for other in others)
        ]
        named[", ".join([title, *differing])] = runs
    return named


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
