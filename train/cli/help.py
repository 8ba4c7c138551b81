"""The first screen of a training command's help, and the list of its presets."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from train.cli.summary import mechanism_names
from train.engine.fields import Mark, marked


def first_screen(presets: Mapping[str, Any], default: str, name: str, *, prog: str, about: str) -> str:
    """What a command does, its usual options with the values of the preset `name`, and examples: at most 24 lines of 80
    characters."""
    config = presets[name]
    decided = "model" in marked(type(config), Mark.DECIDED)
    chooses = not decided and "model.mechanism" not in config.without_effect()
    shown = [
        ("--mechanism NAME", f"the attention of the layers ({mechanism_names(config.model)})")
        if chooses
        else ("--seed N", f"of the order of the data and of the new parameters ({config.loop.seed})"),
        *_of_the_data(config),
        ("--steps N", f"training steps ({config.loop.steps})"),
        ("--batch N", f"rows of a step ({config.loop.batch})"),
        ("--learning_rate X", f"the highest learning rate ({config.optimizer.learning_rate:g})"),
        ("--workdir DIR", "the run's folder (runs/PRESET); the same command resumes"),
    ]
    other = next((preset for preset in presets if preset != default), default)
    needed = [path.rpartition(".")[2] for path in marked(type(presets[default]), Mark.NEEDED)]
    data = "".join(f" --{field} {'FILE' if field == 'data' else 'DIR'}" for field in needed)
    examples = [
        f"{default}{data}" if data else "",
        f"{other}{data} --workdir runs/mine",
        f"{default}{data}{' --mechanism local' if chooses else ''} --steps 200",
    ]
    return screen(presets, default, name, shown, examples, prog=prog, about=about)


def screen(
    presets: Mapping[str, Any],
    default: str,
    name: str,
    shown: Sequence[tuple[str, str]],
    examples: Sequence[str],
    *,
    prog: str,
    about: str,
) -> str:
    """A command's help on one screen: the usual options, each with its meaning, and what follows the command's name in
    examples."""
    unnamed = f"PRESET is {default} if none is named"
    unnamed += "." if name == default else f"; the values below are from {name}."
    options = [*shown, ("--presets", f"lists the {len(presets)} presets")]
    options.append(("--help-all", "lists all options, with their defaults"))
    width = max(len(option) for option, _ in options) + 2
    *usual, listed, everything = (f"  {option:<{width}}{meaning}" for option, meaning in options)
    lines = [
        f"usage: {prog} [PRESET] [OPTIONS]",
        "",
        *textwrap.wrap(f"{about} {unnamed}", 80),
        "",
        *usual,
        "",
        "examples:",
        *(f"  {prog} {example}".rstrip() for example in examples),
        "",
        listed,
        everything,
    ]
    return "\n".join(lines)


def _of_the_data(config: Any) -> list[tuple[str, str]]:
    """The options of a text and its rows, where a task has them."""
    decided = set(marked(type(config), Mark.DECIDED))
    needed = set(marked(type(config), Mark.NEEDED))
    known = {
        "data.data": ("--data TEXT", "the text"),
        "data.tokenizer": ("--tokenizer NAME", "how text becomes tokens"),
        "loop.length": ("--length N", "tokens of a row"),
        "data.length": ("--length N", "tokens of a row at most"),
    }
    found = []
    for path, (option, meaning) in known.items():
        part, _, name = path.partition(".")
        if hasattr(getattr(config, part), name) and path not in decided | needed:
            value = getattr(getattr(config, part), name)
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            found.append((option, f"{meaning} ({shown})"))
    return found


def preset_list(presets: Mapping[str, Any]) -> str:
    """A line for each preset: its name, layers x width, mechanism, and how long it trains."""
    width = max(map(len, presets))
    attention = max(len(mechanism_names(config.model)) for config in presets.values())
    header = f"{'preset':<{width}}  {'layers x width':>14}  {'attention':<{attention}}      training"
    return "\n".join(
        [
            header,
            *(
                f"{name:<{width}}  {f'{config.model.num_layers} x {config.model.d_model}':>14}  "
                f"{mechanism_names(config.model):<{attention}} "
                f"{config.loop.steps:>9,} steps of {config.loop.batch} rows"
                for name, config in presets.items()
            ),
        ]
    )
