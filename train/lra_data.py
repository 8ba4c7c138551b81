"""Writes generated data in the layout of the Long Range Arena's release: python -m train.lra_data TASK --out DIR.

TASK is listops (basic_{train,val,test}.tsv) or pathfinder (images and metadata). The last line of stdout is one JSON
object with the number of examples written, and the number a minute.
"""

from __future__ import annotations

from collections.abc import Sequence

from train.cli.command import start
from train.cli.options import parse_options
from train.data.lra.release import ReleaseOptions, write_release


def main(argv: Sequence[str]) -> None:
    """Writes the files; see the module's text and --help."""
    about = "Writes generated data of the Long Range Arena."
    write_release(parse_options(ReleaseOptions(), argv, prog="python -m train.lra_data", about=about))


if __name__ == "__main__":
    start(main, "train.lra_data")
