"""Completion of `brl-train` and `brl-eval` in bash and zsh: brl-train --completion bash."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from brl_jax.layers import MECHANISMS
from train.cli.options import option_names
from train.tasks.every import TASKS

_SCRIPT = """{zsh}_{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{names}"
  elif [[ "${{COMP_WORDS[COMP_CWORD-1]}}" == --*mechanism ]]; then
    words="{mechanisms}"
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _{function} {program}
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def completion(program: str, names: Sequence[str], shell: str) -> str:
    """A script that a shell evaluates: it completes a command's name, and for training the presets and options.

    Args:
      program: "brl-train" or "brl-eval". names: its commands. shell: "bash" or "zsh".
    """
    words = {name: _words(name) if program == "brl-train" else ["--help", "--workdir"] for name in names}
    return _SCRIPT.format(
        zsh=_ZSH if shell == "zsh" else "",
        function=program.replace("-", "_"),
        program=program,
        names=" ".join(names),
        mechanisms=" ".join(MECHANISMS),
        cases="\n".join(f'      {name}) words="{" ".join(each)}" ;;' for name, each in words.items()),
    )


def _words(name: str) -> list[str]:
    """The presets and options of a training command; a command has the tasks whose names begin with its own."""
    tasks = [task for task in TASKS.values() if task.name.partition("_")[0] == name]
    presets = [preset for task in tasks for preset in task.presets]
    options = [f"--{option}" for task in tasks for option in option_names(task.presets[task.default_preset])]
    return [*presets, "--help", "--help-all", "--presets", *dict.fromkeys(options)]


if __name__ == "__main__":  # run by brl_jax/commands.py with the shell and the names of the commands
    print(completion(Path(sys.argv[0]).name, sys.argv[2:], sys.argv[1]), end="")
