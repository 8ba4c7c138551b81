"""Groups runs of a table that differ only in their seed, and names the groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.engine.config_file import flatten, to_json
from train.tasks.task import Task

Result = Mapping[str, Any]

# The seed, and a place.
_NOT_COMPARED = ("loop.seed", "data.data_dir")
_NAME = "model.mechanism.name"
_LATE = "model.late_mechanism"


def compared(task: Task[Any, Any], config: Any) -> dict[str, Any]:
    """The settings, by dotted name, that runs must share to be averaged: the steps, and all that a resumed run may not
    change."""
    free = task.free_fields() - {"loop.steps"}
    return {
        name: value
        for name, value in flatten(task.to_json(config)).items()
        if name not in _NOT_COMPARED and not any(name == x or name.startswith(f"{x}.") for x in free)
    }


def run_settings(config: Any, *loop: str) -> dict[str, Any]:
    """The settings of a run's data, model and optimizer, and these of its loop, by dotted name.

    The number of test rows is left out: it does not change what was trained.
    """
    settings = {part: to_json(getattr(config, part)) for part in ("data", "model", "optimizer")}
    settings["loop"] = {name: getattr(config.loop, name) for name in loop}
    settings["data"].pop("test_rows", None)
    return flatten(settings)


def alike(
    results: Sequence[Result], name: Callable[[Result], str], settings: str = "configuration"
) -> dict[str, list[Result]]:
    """Groups the results of runs that differ only in their seed, by name. Groups that would share a name get the
    settings in which they differ added to it.

    Args:
      name: gives a result's name in the table.
      settings: the key of a result's settings by dotted name; "configuration" holds those that are `compared`.
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
    if value in (None, "", []):
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def by_network(results: Sequence[Result]) -> dict[str, list[Result]]:
    """`alike` results by the mechanisms of their "settings", in the order of these names."""
    ordered = sorted(results, key=_network)
    return alike(ordered, _network, "settings")


def is_hybrid(result: Result) -> bool:
    """Whether early and late layers have different mechanisms."""
    return f"{_LATE}.name" in result["settings"]


def _network(result: Result) -> str:
    """The mechanisms of a network's layers, joined by + in a hybrid, and its patterns other than sliding windows."""
    settings = result["settings"]
    late = settings.get(f"{_LATE}.name")
    name = settings[_NAME] if late is None else f"{settings[_NAME]} + {late}"
    parts = ("model.encoder_mechanism", "model.mechanism", _LATE)
    patterns = {settings.get(f"{part}.pattern", "sliding") for part in parts} - {"sliding"}
    return " ".join([name, *(f"({pattern.replace('_', ' ')})" for pattern in sorted(patterns))])
