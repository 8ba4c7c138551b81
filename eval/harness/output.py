"""What a command writes: results on stdout, and the files that its options name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matplotlib.figure import Figure

from eval.harness.options import OutputOptions, PictureOptions, command
from eval.harness.pictures import save
from train.engine.errors import UserError
from train.engine.storage import try_to_write

M = TypeVar("M")
O = TypeVar("O", bound=OutputOptions)  # noqa: E741
P = TypeVar("P", bound=PictureOptions)

# What is known of a run before it is measured; these come on the second line.
_FACTS = ("parameters", "step", "seed", "length", "sequences", "examples", "ngram", "layer")


class Measured(NamedTuple):
    """The measures of a run, ready for JSON, and what else a picture of it needs."""

    result: dict[str, Any]
    example: Any = None


def emit(result: Mapping[str, Any], as_json: bool = False) -> None:
    """Prints a result as two readable lines if stdout is a terminal, or else as one line of JSON."""
    text = json.dumps(result) if as_json or not sys.stdout.isatty() else "\n".join(readable(result))
    print(text, flush=True)


def readable(result: Mapping[str, Any]) -> tuple[str, str]:
    """A line of measures, and a line of facts about the run with the names of what only JSON shows."""
    measures, facts, longer = [], [], []
    for name, value in _flat(result).items():
        if isinstance(value, list | dict):
            cases = _cases(value)
            measures += [cases] if cases else []
            longer.append(name)
        elif isinstance(value, float) or (isinstance(value, int) and name not in _FACTS):
            measures.append(f"{name} {_number(value)}")
        elif value is not None:
            facts.append(f"{name} {_number(value)}")
    if longer:
        facts.append(f"with --json also {', '.join(longer)}")
    return ", ".join(measures), ", ".join(facts)


def _flat(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result with its small objects of numbers spread out, as naive.mae."""
    flat: dict[str, Any] = {}
    for name, value in result.items():
        if (
            isinstance(value, dict)
            and 0 < len(value) <= 4
            and not any(isinstance(part, list | dict) for part in value.values())
        ):
            flat |= {f"{name}.{part}": each for part, each in value.items()}
        else:
            flat[name] = value
    return flat


def _cases(value: Any) -> str | None:
    """The first number of each of a few cases, as in "length 64 pairs 4: accuracy 0.9"; None for other values."""
    if not isinstance(value, list) or not 0 < len(value) <= 12 or not all(isinstance(x, dict) for x in value):
        return None
    parts = []
    for case in value:
        where = [f"{name} {x}" for name, x in case.items() if type(x) is int][:2]
        number = next((f"{name} {x:.4g}" for name, x in case.items() if isinstance(x, float)), None)
        if number is None:
            return None
        parts.append(f"{' '.join(where)}: {number}")
    return "; ".join(parts)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def study(
    options: O,
    name: str,
    about: str,
    measure: Callable[[O], Iterable[dict[str, Any] | Measured]],
    draw: Callable[[list[Any]], Figure],
) -> Callable[[Sequence[str]], None]:
    """The main function of `python -m NAME`, which prints each result as soon as it is known, and then draws all of
    them."""

    @command(options, name, about)
    def main(options: O) -> None:
        path = picture_path(getattr(options, "picture", None))
        known = []
        for each in measure(options):
            known.append(each)
            emit(each.result if isinstance(each, Measured) else each, options.json)
        if path is not None:
            save(draw(known), path)

    return main


def each_run(measure: Callable[[P, str], M]) -> Callable[[P], Iterator[M]]:
    """The function of options that measures each run of --workdir."""
    return lambda options: (measure(options, workdir) for workdir in options.workdir)


def picture_path(picture: str | None) -> Path | None:
    """The file that --picture names. Raises UserError if it cannot be written."""
    return _file("--picture", picture, ".png")


def json_path(file: str | None) -> Path | None:
    """The file that --json names. Raises UserError if it cannot be written."""
    return _file("--json", file, "")


def _file(option: str, name: str | None, suffix: str) -> Path | None:
    if name is None:
        return None
    path = Path(name)
    if (
        path.is_dir()
        or (suffix and path.suffix != suffix)
        or not (path.parent.is_dir() and _can_write(path.parent))
    ):
        kind = f"a {suffix} file" if suffix else "a file"
        raise UserError(f"{option}: expected {kind} in a folder that can be written to, got {path}")
    return path


def _can_write(folder: Path) -> bool:
    try:
        try_to_write(folder)
    except OSError:
        return False
    return True
