"""The versions that an environment has of what the library stands on: python -m eval.versions.

Prints a row of the table in docs/install.md. `--ran TEXT` is its last column: what was run there and passed.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from train.cli.options import parse_options

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "jax-triton", "libtpu")


@dataclasses.dataclass(frozen=True)
class VersionsOptions:
    """What the row says."""

    ran: str = ""
    """What was run in this environment."""
    header: bool = True
    """Print the table's header too."""


def installed(package: str) -> str:
    """The version of a package, "-" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def header() -> list[str]:
    """The first two lines of the table."""
    return [f"| Python | {' | '.join(PACKAGES)} | what was run |", "|---" * (len(PACKAGES) + 2) + "|"]


def row(ran: str) -> str:
    """The row of this environment."""
    found = " | ".join(installed(package) for package in PACKAGES)
    return f"| {platform.python_version()} | {found} | {ran} |"


def main(argv: Sequence[str]) -> None:
    """Prints the table; see the module's docstring and --help."""
    options = parse_options(
        VersionsOptions(), argv, prog="python -m eval.versions", about="Installed versions as a table's row."
    )
    print("\n".join([*(header() if options.header else []), row(options.ran)]))
