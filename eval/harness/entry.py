"""How `python -m eval.NAME` starts."""

import sys
from collections.abc import Callable, Sequence

from train.cli.command import command


def start(main: Callable[[Sequence[str]], None], name: str) -> None:
    """Runs a command on the program's arguments and exits; an error that its user can correct is one line, status 2."""
    sys.exit(command(main, name))
