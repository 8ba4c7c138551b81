"""The commands `brl-train` and `brl-eval`, which run the scripts in train and eval from any folder.

The packages `train` and `eval` are not installed, because their names are too common. The commands find them next to
the library if it is installed from a checkout (`pip install -e .`).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def train() -> int:
    """Runs `brl-train NAME [OPTIONS]`, which is `python -m train.NAME [OPTIONS]`."""
    return _run("brl-train", "train")


def evaluate() -> int:
    """Runs `brl-eval NAME [OPTIONS]`, which is `python -m eval.NAME [OPTIONS]`."""
    return _run("brl-eval", "eval")


def _run(program: str, package: str) -> int:
    folder = _ROOT / package
    if not (folder / "lm.py").is_file():
        return _refuse(
            program,
            "the training and evaluation commands are not part of the installed package; expected a checkout of the "
            "repository, installed with: pip install -e '.[train]'",
        )
    names = sorted(
        file.stem for file in folder.glob("*.py") if 'if __name__ == "__main__"' in file.read_text()
    )
    names += sorted(file.parent.name for file in folder.glob("*/__main__.py"))
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: {program} NAME [OPTIONS]; the same as python -m {package}.NAME [OPTIONS]")
        print(f"NAME is one of {', '.join(names)}; {program} NAME --help lists the options of each")
        print(f'completion: eval "$({program} --completion bash)" in ~/.bashrc, or zsh in ~/.zshrc')
        return 0
    if name == "--completion":
        if rest not in (["bash"], ["zsh"]):
            return _refuse(program, f"--completion: expected bash or zsh, got {' '.join(rest) or 'nothing'}")
        module, words = "train.cli.completion", [*rest, *names]
    elif name in names:
        module, words = f"{package}.{name}", rest
    else:
        return _refuse(program, f"NAME: expected one of {', '.join(names)}, got {name!r}")
    sys.path.insert(0, str(_ROOT))
    sys.argv[1:] = words
    try:
        runpy.run_module(module, run_name="__main__")
    except ModuleNotFoundError as error:
        return _refuse(program, f"the module {error.name} is missing: pip install -e '.[train]' in {_ROOT}")
    return 0


def _refuse(program: str, message: str) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return 2
