"""Groups runs of a table that differ only in their seed, and names the groups."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from train.engine.config_file import flatten
from train.tasks.task import Task

Result = Mapping[str, Any]

_ENCODER, _EARLY, _LATE = "model.encoder_mechanism", "model.mechanism", "model.late_mechanism"


def compared(task: Task[Any, Any], config: Any) -> dict[str, Any]:
    """The settings, by dotted name, that runs must share to be averaged: the steps, and all that a resumed run may not
    change."""
    free = task.free_fields() - {"loop.steps"} | {"loop.seed"}
    if task.name != "copy":  # whose pairs of texts have no other name
        free |= {"data.data_dir"}
    return settings_but(task, config, free)


def settings_but(task: Task[Any, Any], config: Any, free: Collection[str]) -> dict[str, Any]:
    """The settings, by dotted name, without these fields and those within them."""
    return {
        name: value
        for name, value in flatten(task.to_json(config)).items()
        if not any(name == x or name.startswith(f"{x}.") for x in free)
    }


def alike(results: Sequence[Result], name: Callable[[Result], str]) -> dict[str, list[Result]]:
    """Groups the results of runs that differ only in their seed, by name. Groups that would share a name get the
    settings in which they differ added to it. Results have the settings that are `compared` as "configuration".
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        key = json.dumps(result.get("configuration", {}), sort_keys=True)
        groups.setdefault((name(result), key), []).append(result)
    named: dict[str, list[Result]] = {}
    for (title, _), runs in groups.items():
        others = [other[0].get("configuration", {}) for (one, _), other in groups.items() if one == title]
        differing = [
            f"{field.rsplit('.', 1)[-1]} {_plain(value)}"
            for field, value in runs[0].get("configuration", {}).items()
            if any(other.get(field) != value for other in others)
        ]
        named.setdefault(", ".join([title, *differing]), []).extend(runs)
    return named


def _plain(value: Any) -> str:
    if value in (None, "", []):
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def by_network(results: Sequence[Result]) -> dict[str, list[Result]]:
    """`alike` results by the mechanisms of their networks, in the order of these names."""
    return alike(sorted(results, key=_network), _network)


def is_hybrid(result: Result) -> bool:
    """Whether early and late layers have different mechanisms."""
    return f"{_LATE}.name" in result["configuration"]


def _network(result: Result) -> str:
    """The mechanisms of a network's layers, joined by + in a hybrid, after that of an encoder that has another, and its
    patterns other than sliding windows."""
    settings = result["configuration"]
    names = (f"{encoder} to " if (encoder := settings.get(f"{_ENCODER}.name")) else "") + settings[
        f"{_EARLY}.name"
    ]
    late = settings.get(f"{_LATE}.name")
    name = names if late is None else f"{names} + {late}"
    patterns = {settings.get(f"{part}.pattern", "sliding") for part in (_ENCODER, _EARLY, _LATE)} - {
        "sliding"
    }
    return " ".join([name, *(f"({pattern.replace('_', ' ')})" for pattern in sorted(patterns))])
