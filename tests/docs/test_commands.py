"""README.md and docs/ name only what exists: every command parses with its real parser, every path is in the
repository."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

import train.cli.options

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

# Placeholders that readers fill in, each with a value.
_PLACEHOLDERS = {
    "lra-TASK-NAME": "lra-listops-full",
    "v5e:SLICE": "v5e:4x4",
    "$name": "full-8",
    "$horizon": "96",
    "$mechanism": "full",
    "$seed": "0",
    "$rate": "1e-5",
    "--mechanism NAME": "--mechanism linear",
}


class Parsed(BaseException):
    """Raised instead of running a command whose options are valid."""


def commands(text: str) -> list[str]:
    """The commands `python -m MODULE ...` of a page's code blocks and code spans."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in (*lines, *(" ".join(span.split()) for span in spans)):
        found += re.findall(r"(?:^|[ /])python -m ((?:train|eval)\b[^;&\"]*)", line)
    return found


def row_options(text: str) -> list[str]:
    """The options of `train.lm` in the rows of a table."""
    return [f"train.lm {options}" for options in re.findall(r"^\| `(--mechanism [^`]+)`", text, re.MULTILINE)]


COMMANDS = [
    pytest.param(command, id=f"{page.name}: {command}")
    for page in PAGES
    for command in dict.fromkeys(
        commands(page.read_text()) + (row_options(page.read_text()) if page.name == "results.md" else [])
    )
]


def test_commands_are_found():
    text = "`python -m eval.lm\n--workdir x` and\n```\nA=1 python -m train.lm a \\\n  --b 1  # why\n```\n"
    assert commands(text) == ["train.lm a    --b 1  # why", "eval.lm --workdir x"]
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("command", COMMANDS)
def test_command_parses(command, monkeypatch, tmp_path):
    for placeholder, value in _PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    module, *argv = shlex.split(command, comments=True)
    try:
        main = importlib.import_module(f"{module}.__main__").main
    except ModuleNotFoundError:
        main = importlib.import_module(module).main
    original = train.cli.options.parse_options

    def parse_only(*args, **kwargs):
        original(*args, **kwargs)
        raise Parsed

    for loaded in list(sys.modules.values()):
        if getattr(loaded, "parse_options", None) is original:
            monkeypatch.setattr(loaded, "parse_options", parse_only)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Parsed):
        main(argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page):
    """Paths of the repository, tests named with `::` or `-k`, links, and dotted names of modules."""
    text = page.read_text()
    top = r"(?:brl_jax|pallas_kernels|train|eval|tests|docs|notebooks|\.ci)"
    paths = re.findall(rf"(?<![\w./-])({top}/[\w./-]*\w)", text)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [path for path in paths if not (ROOT / path).exists()]
    made = (
        ROOT / "docs" / "api"
    ).resolve()  # by the site's hook; `mkdocs build --strict` checks links into it
    targets = {link: (page.parent / link).resolve() for link in links}
    missing += [link for link, path in targets.items() if not path.exists() and made not in path.parents]
    for name in re.findall(r"`((?:brl_jax|pallas_kernels)(?:\.\w+)+)", text):
        found, rest = importlib.import_module(name.split(".")[0]), name.split(".")[1:]
        for i, part in enumerate(rest):
            if not hasattr(found, part):
                try:
                    found = importlib.import_module(".".join([name.split(".")[0], *rest[: i + 1]]))
                except ImportError:
                    missing.append(name)
                    break
            else:
                found = getattr(found, part)
    for path, test in re.findall(r"(tests/[\w/.]+\.py)::(\w+)", text):
        if f"def {test}(" not in (ROOT / path).read_text():
            missing.append(f"{path}::{test}")
    for path, word in re.findall(r"(tests/[\w/.]+\.py) -k (\w+)", " ".join(text.split())):
        if word.lower() not in (ROOT / path).read_text().lower():
            missing.append(f"{path} -k {word}")
    assert not missing
