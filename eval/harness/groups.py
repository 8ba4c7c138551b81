"""Which runs of a table differ in their seed alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.engine.config_file import flatten
from train.tasks.task import Task

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


def alike(
    results: Sequence[Result], name: Callable[[Result], str], settings: str = "configuration"
) -> dict[str, list[Result]]:
    """The results of runs that differ in their seed alone, by name; where several groups have one name, it goes on with
    the settings in which they differ.

    Args:
      results: those of the runs. name: what a result's row is called. settings: where a result has its run's settings,
        by dotted name; "configuration" has those that are `compared`.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        key = json.dumps(result.get(settings, {}), sort_keys=True)
        groups.setdefault((name(result), key), []).append(result)
    named: dict[str, list[Result]] = {}
    for (title, _), runs in groups.items():
        others = [other[0].get(settings, {}) for (one, _), other in groups.items() if one == title]
        differing = [
            f"{field.rsplit('.', 1)[-1]} {_plain(value)}"
            for field, value in runs[0].get(settings, {}).items()
            if any(other.get(field) != value for other in others)
        ]
        named.setdefault(", ".join([title, *differing]), []).extend(runs)
    return named


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
