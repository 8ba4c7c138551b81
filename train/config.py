"""Configurations of runs: what the command line reads, what is kept in config.json, what may differ on
resuming.

A configuration is a frozen dataclass of parts. The command line shows the fields of all parts side by side
(`--steps`, `--d_model`, `--learning_rate`), except those of the mechanism, which keep their prefix
(`--mechanism.window`). `--mechanism NAME` replaces the mechanism's whole dataclass, so it is read before the
rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from etils import epath

from brl_jax.attention.core.checks import check_at_least
from brl_jax.layers import MECHANISMS, Mechanism, mechanism_name
from brl_jax.models import DecoderConfig, StackConfig
from brl_jax.sharding import AXES, MeshConfig
from train.data import DataConfig
from train.errors import UserError
from train.hosts import HostsConfig
from train.optimizer import OptimizerConfig

T = TypeVar("T")
M = TypeVar("M", bound=StackConfig)
Flat = tyro.conf.arg(name="")

# Command-line options that take a mechanism's name, and the model's field each stands for.
_MECHANISM_FIELDS = ("mechanism", "late_mechanism")

# What a run may change when it goes on: how long it lasts, what is measured, what is kept, and the devices.
_FREE = (
    frozenset(
        f"loop.{name}"
        for name in (
            "workdir",
            "steps",
            "eval_every",
            "eval_tokens",
            "full_eval",
            "patience",
            "checkpoint_every",
            "keep_checkpoints",
            "tensorboard",
        )
    )
    | {
        "data.cache_dir",
        "data.processes",
        "data.test_examples",
        "data.test_prompts",
        "sample_prompt",
        "sample_tokens",
    }
    | {f"mesh.{axis}" for axis in AXES}
    | {f"hosts.{field.name}" for field in dataclasses.fields(HostsConfig)}
)

# Fields that the data decide: no options of the command line.
_DECIDED = frozenset(
    ("vocab_size", "num_classes", "max_length", "task", "is_causal", "num_inputs", "num_outputs")
)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The training loop: how long, how much at a time, what is measured and kept."""

    workdir: str = "runs/small"
    """Folder of the run: config.json, metrics.jsonl, checkpoints, TensorBoard events. The same command again
    goes on where the run stopped."""
    steps: int = 1000
    """Training steps in all."""
    seed: int = 0
    """Seed of the parameters, the dropout and the order of the text."""
    batch: int = 16
    """Rows of a step."""
    accumulation: int = 1
    """Microbatches that a step's rows are cut in; their gradients are summed."""
    eval_every: int = 250
    """Steps from one evaluation to the next; one more comes at the end."""
    patience: int = 0
    """Evaluations in a row that are no better than the best before them after which the run ends; 0: it never
    does."""
    checkpoint_every: int = 250
    """Steps from one checkpoint to the next; an evaluation and the end come with one too."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints are kept, besides the one that did best on held-out data."""
    tensorboard: bool = True
    """Write TensorBoard event files beside metrics.jsonl."""
    log_gradient_std: bool = False
    """Log the relative standard deviation over the run of the gradients' norms (train/moments.py)."""

    def __post_init__(self):
        if not self.workdir:
            raise ValueError("workdir must be a folder's path, got an empty one")
        check_at_least(
            self, "steps", "batch", "accumulation", "eval_every", "checkpoint_every", "keep_checkpoints"
        )
        check_at_least(self, "seed", "patience", least=0)
        if self.batch % self.accumulation:
            raise ValueError(
                f"batch must be a multiple of accumulation={self.accumulation}, got {self.batch}"
            )


@dataclasses.dataclass(frozen=True)
class LmLoopConfig(LoopConfig):
    """The loop over a text, whose rows go on where they stopped the step before."""

    length: int = 512
    """Tokens of a row in one step."""
    eval_tokens: int = 100_000
    """Held-out tokens that an evaluation reads; 0: all."""
    full_eval: bool = True
    """The evaluation at the end reads all held-out tokens."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, "length")
        check_at_least(self, "eval_tokens", least=0)
        if self.eval_tokens == 1:
            raise ValueError("eval_tokens must be at least 2, or 0 for all, got 1")


@dataclasses.dataclass(frozen=True)
class ModelConfig(DecoderConfig):
    """The network."""

    # The tokenizer decides: not an option of the command line.
    vocab_size: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 256


@dataclasses.dataclass(frozen=True)
class LmConfig:
    """A decoder trained to predict the next token of a text."""

    loop: Annotated[LmLoopConfig, Flat]
    data: Annotated[DataConfig, Flat]
    model: Annotated[ModelConfig, Flat]
    optimizer: Annotated[OptimizerConfig, Flat]
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    hosts: HostsConfig = HostsConfig()
    """The processes."""
    sample_prompt: str = ""
    """Text that the sample printed at the end goes on from; empty: the first words of the held-out text."""
    sample_tokens: int = 256
    """Tokens of that sample; 0: none."""

    def __post_init__(self):
        check_at_least(self, "sample_tokens", least=0)


def parse(presets: Mapping[str, T], default_preset: str, argv: Sequence[str], *, prog: str, about: str) -> T:
    """The configuration that a command line `[PRESET] [--mechanism NAME] [OPTIONS]` asks for.

    A preset without `--workdir` works in runs/PRESET. `--help` prints the options and exits.

    Args:
      presets: configurations by name; their parts `loop` and `model` are known here.
      default_preset: the preset meant when none is named.
      argv: the arguments, without the program's name.
      prog, about: the program's name and a line about it, for the help.

    Raises:
      UserError: an unknown preset, mechanism or option (with the nearest name), or a value out of range.
    """
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else default_preset
    if name not in presets:
        raise UserError(f"PRESET: {_unknown(name, presets)}")
    config: Any = presets[name]
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, workdir=f"runs/{name}"))
    for field in _MECHANISM_FIELDS:
        config = dataclasses.replace(config, model=_swap_mechanism(config.model, field, rest))
    description = (
        f"{about}\n\nPRESET is one of {', '.join(presets)}; {default_preset} if none is named. "
        f"--mechanism NAME and --late_mechanism NAME choose another mechanism: {', '.join(MECHANISMS)}. "
        f"The defaults below are those of {name} (and of the mechanism named)."
    )
    return parse_options(config, rest, prog=f"{prog} [PRESET]", about=description)


def parse_options(default: T, argv: Sequence[str], *, prog: str, about: str) -> T:
    """`default` (a dataclass) with the options of argv put in; `--help` prints them and exits.

    Raises:
      UserError: in one line, an unknown option (with the nearest one) or a value that won't do.
    """
    complaint = io.StringIO()
    options = _options(default)
    try:
        with contextlib.redirect_stderr(complaint):
            config, unknown = tyro.cli(
                type(default),
                prog=prog,
                description=about,
                args=list(argv),
                default=default,
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_named(_one_line(complaint.getvalue()), options)) from None
    except ValueError as error:  # from a part whose fields have no prefix
        raise UserError(_named(str(error), options)) from error
    if unknown:
        option = unknown[0].split("=")[0]
        if not option.startswith("-"):
            raise UserError(
                f"unexpected argument {option!r}; expected options (--NAME VALUE), the preset first"
            )
        near = difflib.get_close_matches(option.lstrip("-").replace("-", "_"), options, n=1, cutoff=0.5)
        raise UserError(
            f"unknown option {option}; "
            + (f"did you mean --{near[0]}?" if near else "see --help for those there are")
        )
    return config


def _named(message: str, options: Sequence[str]) -> str:
    """A message that begins with a field's name, beginning with its option instead."""
    return f"--{message}" if message.split(" ", 1)[0].rstrip(",") in options else message


def _swap_mechanism(model: M, field: str, rest: list[str]) -> M:
    """Takes `--field NAME` out of `rest`; the field's dataclass becomes that mechanism's, at its defaults."""
    spellings = (f"--{field}", f"--{field.replace('_', '-')}")
    at = next((i for i, word in enumerate(rest) if word.split("=")[0] in spellings), None)
    if at is None:
        return model
    _, equals, name = rest.pop(at).partition("=")
    if not equals:
        if at == len(rest) or rest[at].startswith("-"):
            raise UserError(f"--{field}: expected one of {', '.join(MECHANISMS)}")
        name = rest.pop(at)
    if field == "late_mechanism" and name == "none":
        return dataclasses.replace(model, late_mechanism=None)
    if name not in MECHANISMS:
        raise UserError(f"--{field}: {_unknown(name, MECHANISMS)}")
    if type(getattr(model, field)) is MECHANISMS[name]:
        return model
    mechanism = MECHANISMS[name]()
    # As many layers as the preset has, or as many more as the mechanism's blocks need: --num_layers is yet to be read.
    layers = -(-model.num_layers // mechanism.group) * mechanism.group
    return _replace(model, field, mechanism, num_layers=layers)


def _replace(part: Any, field: str, value: Any, **others: Any) -> Any:
    try:
        return dataclasses.replace(part, **{field: value, **others})
    except ValueError as error:
        raise UserError(f"--{field}: {error}") from error


def _unknown(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"got {name!r}; {hint}expected one of {', '.join(known)}"


def _one_line(complaint: str) -> str:
    """tyro's box of an error as one line: what is wrong, and what the option expects."""
    text = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", complaint).splitlines())
    # The frame's top holds a title; where the terminal knows ASCII only, that is a line and a rule.
    body = text.partition("╮\n" if "╮" in text else "-\n")[2]
    lines = [line.strip("│╰╯ \t") for line in body.splitlines()]
    rules = [i for i, line in enumerate(lines) if line and not line.strip("─-")]
    message = " ".join(lines[: rules[0]] if rules else lines)
    message = re.sub(r"^Error parsing (loop|data|model|optimizer|[A-Z]\w*): ", "", message)
    message = re.sub(r"^Error parsing (?:model\.)?(mesh|hosts|(?:late_)?mechanism): ", r"\1.", message)
    message = message.removeprefix("Error parsing ")
    message = re.sub(r"invalid choice '(.*?)' .*Expected one of \((.*?)\)\.?", _with_nearest, message)
    usage = [lines[i + 1] for i, line in enumerate(lines[:-1]) if line == "Argument helptext:"]
    return message + (f"; expected {usage[0]}" if usage else "")


def _with_nearest(choice: re.Match[str]) -> str:
    near = difflib.get_close_matches(choice[1], re.findall(r"'(.*?)'", choice[2]), n=1)
    return choice[0].removesuffix(".") + (f"; did you mean {near[0]!r}?" if near else "")


def _options(config: Any) -> list[str]:
    """Names of the options for the fields of a configuration."""
    paths = [_option(path) for path in flatten(to_json(config))]
    return [
        *_MECHANISM_FIELDS,
        *(path for path in paths if path not in _DECIDED and not path.endswith(".name")),
    ]


def to_json(config: Any) -> dict[str, Any]:
    """A configuration as nested dictionaries; a mechanism is its fields and its "name" in MECHANISMS."""
    values: dict[str, Any] = {}
    if isinstance(config, Mechanism):
        values["name"] = mechanism_name(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = to_json(value) if dataclasses.is_dataclass(value) else value
    return values


def from_json(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """The configuration that `to_json` wrote; fields it lacks have their defaults.

    Args:
      kind: the configuration's class; values: what was read; source: where from, for the error.

    Raises:
      UserError: a field or mechanism this version doesn't know, or a value out of range.
    """
    return _from_json(kind, values, source, "")


def _from_json(kind: Any, values: Any, source: str, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise UserError(f"{source}: {path or 'the file'} must be an object, got {values!r}")
    values = dict(values)
    if issubclass(kind, Mechanism):
        name = values.pop("name", None)
        if name not in MECHANISMS:
            raise UserError(f"{source}: {path}.name: expected one of {', '.join(MECHANISMS)}, got {name!r}")
        kind = MECHANISMS[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in fields]
    if unknown:
        where = ".".join(filter(None, (path, unknown[0])))
        raise UserError(f"{source}: unknown field {where}; this version knows {', '.join(fields)}")
    for name, value in values.items():
        part = _part(hints[name])
        if part is not None and value is not None:
            values[name] = _from_json(part, value, source, ".".join(filter(None, (path, name))))
        elif isinstance(value, list):
            values[name] = tuple(value)
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source}: {path or kind.__name__}: {error}") from error


def _part(hint: Any) -> type | None:
    """The dataclass in a field's type, if there is one."""
    options = (hint, *typing.get_args(hint))
    return next((kind for kind in options if dataclasses.is_dataclass(kind) and isinstance(kind, type)), None)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Fields, as "name old -> new", that keep a run of `old` from going on as `new` (both from `to_json`).

    How long a run lasts, what is measured, what is kept and the devices may differ.
    """
    old_flat, new_flat = flatten(old), flatten(new)
    names = [name for name in old_flat | new_flat if name not in _FREE]
    missing = object()
    return [
        f"{_option(name)} {old_flat.get(name, 'absent')} -> {new_flat.get(name, 'absent')}"
        for name in names
        if old_flat.get(name, missing) != new_flat.get(name, missing)
    ]


def _option(path: str) -> str:
    """The command line's name of a field."""
    part, dot, name = path.partition(".")
    return name if dot and part in ("loop", "data", "model", "optimizer") else path


def write_json(values: Mapping[str, Any], path: epath.Path) -> None:
    """Writes a configuration (from `to_json`), aside and then renamed: the file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(values, indent=2) + "\n")
    aside.replace(path)


def read_json(kind: type[T], path: str | os.PathLike[str]) -> T:
    """Reads what `write_json` wrote.

    Raises:
      UserError: there is no such file, it is no JSON, or see `from_json`.
    """
    try:
        values = json.loads(epath.Path(path).read_text())
    except FileNotFoundError as error:
        raise UserError(f"--workdir: no run there: {os.fspath(path)} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{os.fspath(path)}: cannot be read: {error}") from error
    return from_json(kind, values, os.fspath(path))
