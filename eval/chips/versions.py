"""The versions of the libraries in an environment: python -m eval.versions.

Prints a row of the table in docs/install.md. `--ran TEXT` is its last column: what ran there and passed.
"""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import PackageNotFoundError, version

from brl_jax.fields import Checked
from eval.harness.options import command
from eval.harness.table import Table

PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "jax-triton", "libtpu")


@dataclasses.dataclass(frozen=True)
class VersionsOptions(Checked):
    """What the row says."""

    ran: str = ""
    """What was run in this environment."""


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@command(VersionsOptions(), "eval.versions", "Installed versions as a table's row.")
def main(options: VersionsOptions) -> None:
    table = Table("Python", *PACKAGES, "what was run")
    table.add(platform.python_version(), *map(installed, PACKAGES), options.ran)
    print(table)
