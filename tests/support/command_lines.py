"""Builds command lines for tests."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from train.cli.command import command
from train.cli.options import parse

#: Options of a tiny network and a short run of `train.mlm`.
TINY_MLM = (
    "--tokenizer bytes --length 32 --batch 8 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --warmup_steps 2 "
    "--tensorboard False --eval_tokens 600 --full_eval False --mechanism local --mechanism.window 4"
)


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


def run(module: str, words: Sequence[str], monkeypatch: Any, capsys: Any) -> tuple[int, str]:
    """The exit status of a command and what it printed on standard error."""
    monkeypatch.setattr(sys, "argv", [module, *words])
    package = importlib.util.find_spec(module).submodule_search_locations
    status = command(importlib.import_module(f"{module}.__main__" if package else module).main, module)
    return status, capsys.readouterr().err


def _words(line: str | Sequence[str]) -> list[str]:
    return line.split() if isinstance(line, str) else list(line)
