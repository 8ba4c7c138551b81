"""Configurations of runs, and the command line that sets them: docs/house.md, "The path of an option".

`--mechanism NAME` replaces the mechanism's whole dataclass, so it is read before the other options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_type_hints

import docstring_parser
import tyro

import brl_jax
from brl_jax.configuration import to_json
from brl_jax.layers import MECHANISMS
from brl_jax.models import StackConfig
from train.cli.help import first_screen, preset_list
from train.cli.hints import hint_for
from train.engine.config_file import flatten, option_name
from train.engine.errors import UserError
from train.engine.fields import Mark, marked
from train.engine.metrics import as_started
from train.tasks.run_config import RunConfig

_REGISTRY = tyro.constructors.ConstructorRegistry()
T = TypeVar("T")
R = TypeVar("R", bound=RunConfig)
M = TypeVar("M", bound=StackConfig)

# Command-line options that take the name of a mechanism; each is also the model's field that it sets. The first one is
# for models with an encoder and a decoder, and is set first: by default the encoder has the decoder's mechanism.
_MECHANISM_FIELDS = ("encoder_mechanism", "mechanism", "late_mechanism")
# An error about an unknown preset names this many; --presets lists all of them.
_PRESETS_SHOWN = 30
# What tyro says of values that it cannot read, and what we say.
_IN_WORDS = {
    r"(Could not|no type matching) .*?(arguments:?|from) \[(.*?)\].*": r"got \3",
    r"invalid literal for int\(\) with base 10: ": "expected an integer, got ",
    r"could not convert string to float: ": "expected a number, got ",
    r"Missing value for argument '(.*?)'\. Expected 1 values\.": r"\1: expected a value",
    r"Missing value for argument '(.*?)'\. Expected (\d+) values\.": r"\1: expected \2 values",
}


def parse(
    presets: Mapping[str, R],
    default_preset: str,
    argv: Sequence[str],
    *,
    prog: str,
    about: str,
    screen: Callable[..., str] = first_screen,
) -> R:
    """The configuration that a command line `[PRESET] [--mechanism NAME] [OPTIONS]` asks for.

    Without `--workdir` the run's folder is runs/PRESET. `--help` prints the most used options, `--help-all` all of
    them, both with the values of the preset that is named, and `--presets` the presets; each exits."""
    rest = list(argv)
    if "--presets" in argv:
        print(preset_list(presets))
        raise SystemExit(0)
    _check_version(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else default_preset
    if name not in presets:
        raise UserError(f"PRESET: {_of_another_command(name) or _unknown(name, presets, _PRESETS_SHOWN)}")
    if {"-h", "--help"} & set(argv):
        print(as_started(screen(presets, default_preset, name, prog=prog, about=about)))
        raise SystemExit(0)
    config: Any = presets[name]
    config = config.changed(loop={"workdir": f"runs/{name}"})
    description = (
        f"{about}\n\nPRESET is one of {len(presets)}, which --presets lists; the default is {default_preset}. "
        f"--mechanism NAME and --late_mechanism NAME choose another mechanism: {', '.join(MECHANISMS)}. "
        f"The defaults below come from {name} (and from the mechanism that is named)."
    )
    return parse_onto(config, rest, prog=f"{prog} [PRESET]", about=description).resolved()


def parse_onto(config: R, argv: Sequence[str], *, prog: str, about: str) -> R:
    """A configuration with the options of argv set, as `parse_options` does, and with the mechanisms that it names."""
    rest, changed = list(argv), config
    for field in _mechanism_fields(config):
        changed = dataclasses.replace(changed, model=_swap_mechanism(changed.model, field, rest))
    parsed = parse_options(changed, rest, prog=prog, about=about)
    _check_effects(parsed, argv)  # `rest` lacks the mechanisms' names
    return parsed


def parse_options(default: T, argv: Sequence[str], *, prog: str, about: str) -> T:
    """`default` (a dataclass) with the options of argv set; `--help` and `--help-all` print them and exit.

    A dataclass may have a method `without_effect`, which returns its fields (or parts) that change nothing with these
    values of the others, each with the reason, such as {"final_share": "with decay constant"}.

    Raises:
      UserError: an unknown option (with the nearest one), an invalid value or an option without effect, in one line.
    """
    _check_version(argv)
    complaint, screen = io.StringIO(), io.StringIO()
    options = option_names(default)
    _check_repeated(argv, set(options) - _repeatable(default))
    if {"-h", "--help", "--help-all"} & set(argv):
        _join_lines(default)
    # tyro colours what it prints on a terminal, whatever NO_COLOR says, but not into a buffer.
    plain = contextlib.redirect_stdout(screen) if os.environ.get("NO_COLOR") else contextlib.nullcontext()
    try:
        with contextlib.redirect_stderr(complaint), plain, _REGISTRY:
            config, unknown = tyro.cli(
                type(default),
                prog=as_started(prog),
                description=about,
                args=["--help" if word == "--help-all" else word for word in argv],
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:
            print(screen.getvalue(), end="")
            raise
        raise UserError(_with_option(_one_line(complaint.getvalue()), options)) from None
    except ValueError as error:  # raised by a part whose fields have no prefix
        raise UserError(_with_option(str(error), options)) from error
    if unknown:
        option = unknown[0].split("=")[0]
        if not option.startswith("-"):
            raise UserError(f"unexpected argument {option!r}; usage: {as_started(prog)} --NAME VALUE ...")
        name = _name_of(option)
        if name in options:  # a mechanism's name, which was taken out of argv when it was first named
            raise UserError(f"--{name} is given twice; expected it once")
        raise UserError(
            f"unknown option {option}: {hint_for(name, options, _decided_options(default), default)}"
        )
    _check_effects(config, argv)
    return config


@_REGISTRY.primitive_rule
def _none(
    kind: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[None] | None:
    """Reads None as tyro does, but shows "None|INT" in the help instead of "{None}|INT"."""
    if kind.type is not type(None):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="None",
        choices=("None",),
        instance_from_str=lambda words: None,
        is_instance=lambda value: value is None,
        str_from_instance=lambda value: ["None"],
    )


@_REGISTRY.primitive_rule
def _switch(
    kind: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[bool] | None:
    """Reads a switch, whose value may be left out: `--tune` is `--tune True`."""
    if kind.type is not bool:
        return None
    values = {(): True, ("True",): True, ("False",): False}

    def read(words: list[str]) -> bool:
        if tuple(words) not in values:
            raise ValueError(f"expected True or False, got {' '.join(words)!r}")
        return values[tuple(words)]

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[True|False]",
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _join_lines(part: Any) -> None:
    """Gives tyro the text of each option as one line, which it wraps; of docstrings it keeps the line breaks, because
    the lines are indented."""
    texts: dict[str, str] = {}
    for kind in filter(dataclasses.is_dataclass, reversed(type(part).__mro__)):
        texts |= {x.arg_name: x.description or "" for x in docstring_parser.parse_from_object(kind).params}
    for field in dataclasses.fields(part):
        if field.name in texts:
            text = " ".join(texts[field.name].split())
            field.metadata = types.MappingProxyType({**field.metadata, "help": text})
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            _join_lines(value)


def _check_effects(config: Any, argv: Sequence[str]) -> None:
    """Raises UserError if argv sets an option that changes nothing with the others."""
    given = given_options(argv)
    for path, reason in _without_effect(config, ""):
        option = option_name(path)
        for name in given:
            if name == option or name.startswith(f"{option}."):
                raise UserError(f"--{name} has no effect {reason}")


def _without_effect(part: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """The dotted names of the fields without effect in a configuration and its parts, each with the reason."""
    for name, reason in getattr(part, "without_effect", dict)().items():
        yield prefix + name, reason
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from _without_effect(value, f"{prefix}{field.name}.")


def given_options(argv: Sequence[str]) -> list[str]:
    """The names of the options in a command line."""
    return [_name_of(word) for word in argv if word.startswith("--")]


def _name_of(word: str) -> str:
    return word.split("=")[0].lstrip("-").replace("-", "_")


def _check_version(argv: Sequence[str]) -> None:
    """Prints the version and exits if it is asked for."""
    if "--version" in argv:
        print(f"brl-jax {brl_jax.__version__}")
        raise SystemExit(0)


def _repeatable(default: Any) -> set[str]:
    """The options that may be given several times."""
    hints = get_type_hints(type(default), include_extras=True)
    return {name for name, hint in hints.items() if tyro.conf.UseAppendAction in get_args(hint)[1:]}


def _check_repeated(argv: Sequence[str], options: Collection[str]) -> None:
    """Raises UserError if an option is given twice: tyro would silently take the last one."""
    given = given_options(argv)
    for name in dict.fromkeys(given):
        if name in options and given.count(name) > 1:
            raise UserError(f"--{name} is given twice; expected it once")


def _with_option(message: str, options: Sequence[str]) -> str:
    """The message with dashes in front if its first word is an option."""
    return f"--{message}" if message.split(" ", 1)[0].rstrip(",") in options else message


def _mechanism_fields(config: Any) -> tuple[str, ...]:
    """The options that take the name of a mechanism in this configuration."""
    if "model" in marked(type(config), Mark.DECIDED):
        return ()
    model = getattr(config, "model", None)
    return _MECHANISM_FIELDS if hasattr(model, "encoder_mechanism") else _MECHANISM_FIELDS[1:]


def _swap_mechanism(model: M, field: str, rest: list[str]) -> M:
    """Takes `--field NAME` out of `rest` and gives the model's field the named mechanism, at its defaults."""
    spellings = (f"--{field}", f"--{field.replace('_', '-')}")
    at = next((i for i, word in enumerate(rest) if word.split("=")[0] in spellings), None)
    if at is None:
        return model
    _, equals, name = rest.pop(at).partition("=")
    if not equals:
        if at == len(rest) or rest[at].startswith("-"):
            raise UserError(f"--{field}: expected one of {', '.join(MECHANISMS)}")
        name = rest.pop(at)
    if field != "mechanism" and name == "none":
        return _replace(model, field, None)
    if name not in MECHANISMS:
        raise UserError(f"--{field}: {_unknown(name, MECHANISMS, len(MECHANISMS))}")
    if type(getattr(model, field)) is MECHANISMS[name]:
        return model
    mechanism = MECHANISMS[name]()
    if field == "encoder_mechanism":  # the encoder has its own layers
        return _replace(model, field, mechanism)
    # --num_layers is read later; until then, the preset's number of layers is rounded up to whole blocks, and to one
    # layer for each mechanism.
    layers = max(-(-model.num_layers // mechanism.group) * mechanism.group, 1 + (field == "late_mechanism"))
    return _replace(model, field, mechanism, num_layers=layers)


def _replace(part: Any, field: str, value: Any, **others: Any) -> Any:
    try:
        return dataclasses.replace(part, **{field: value, **others})
    except ValueError as error:
        raise UserError(f"--{field}: {error}") from error


def _of_another_command(preset: str) -> str | None:
    """What to say of a preset that another command has."""
    from train.tasks.every import TASKS  # takes a second, which only this error needs

    owner = next((task.name.partition("_")[0] for task in TASKS.values() if preset in task.presets), None)
    return owner and f"{preset} is a preset of train.{owner}"


def _unknown(name: str, known: Mapping[str, Any], num_shown: int) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    shown = ", ".join(list(known)[:num_shown])
    more = f" and {len(known) - num_shown} more (see --presets)" if len(known) > num_shown else ""
    return f"got {name!r}; {hint}expected one of {shown}{more}"


def _one_line(complaint: str) -> str:
    """The error that tyro prints in a box, as one line.

    tyro has errors as objects too, but only in a private module (`tyro._errors`) that it may change in any release.
    """
    text = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", complaint).splitlines())
    # The box has a title at the top; on an ASCII terminal it is a line and a rule.
    body = text.partition("╮\n" if "╮" in text else "-\n")[2]
    lines = [line.strip("│╰╯ \t") for line in body.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─-")]
    message = " ".join(lines[: rules[0]] if rules else lines)
    message = re.sub(r"^Error parsing (loop|data|model|optimizer|[A-Z]\w*): ", "", message)
    message = re.sub(r"^Error parsing (?:(?:data|model)\.)?([a-z][a-z_.]*): ", r"\1.", message)
    message = message.removeprefix("Error parsing ")
    for pattern, words in _IN_WORDS.items():
        message = re.sub(pattern, words, message)
    message = re.sub(r"invalid choice '(.*?)' .*Expected one of \((.*?)\)\.?", _with_nearest, message)
    usage = [lines[i + 1] for i, line in enumerate(lines[:-1]) if line == "Argument helptext:"]
    return message + (f"; expected {usage[0]}" if usage and "expected" not in message else "")


def _with_nearest(choice: re.Match[str]) -> str:
    near = difflib.get_close_matches(choice[1], re.findall(r"'(.*?)'", choice[2]), n=1)
    return choice[0].removesuffix(".") + (f"; did you mean {near[0]!r}?" if near else "")


def option_names(config: Any) -> list[str]:
    """The names of a configuration's options."""
    paths = [path for path in flatten(to_json(config)) if not _is_decided(config, path)]
    return [*_mechanism_fields(config), *(option_name(path) for path in paths if not path.endswith(".name"))]


def _decided_options(config: Any) -> set[str]:
    """Names of the fields that are not options, because the task or its data set them."""
    return {option_name(path) for path in flatten(to_json(config)) if _is_decided(config, path)}


def _is_decided(config: Any, path: str) -> bool:
    decided = marked(type(config), Mark.DECIDED)
    return any(path == name or path.startswith(f"{name}.") for name in decided)
