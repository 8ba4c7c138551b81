"""Writes generated data in the layout of the Long Range Arena's release: python -m train.lra_data TASK --out DIR.

TASK is listops (basic_{train,val,test}.tsv) or pathfinder (images and metadata). The last line of stdout is one JSON
object with the number of examples written, and the number a minute.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Literal

import tyro

from train.cli.command import start
from train.cli.options import parse_options
from train.data.lra import listops, pathfinder
from train.data.lra.tasks import LraDataConfig, sizes
from train.engine.errors import UserError
from train.engine.fields import Decided


@dataclasses.dataclass(frozen=True)
class ReleaseOptions(LraDataConfig):
    """What to write."""

    task: tyro.conf.Positional[Literal["listops", "pathfinder"]] = "listops"
    """listops or pathfinder."""
    data_dir: Decided[str | None] = None
    length: Decided[int] = 128**2
    buckets: Decided[tuple[int, ...]] = ()
    cache_dir: Decided[str | None] = None
    out: str = ""
    """Name of a new folder."""


def main(argv: Sequence[str]) -> None:
    """Writes the files; see the module's text and --help."""
    about = "Writes generated data of the Long Range Arena."
    options = parse_options(ReleaseOptions(), argv, prog="python -m train.lra_data", about=about)
    if not options.out:
        raise UserError("--out: expected the name of a new folder, got none")
    counts, started = sizes(options), time.perf_counter()
    if options.task == "listops":
        listops.write_release(options.out, options.listops, options.data_seed, counts, options.processes)
    else:
        spec = pathfinder.PathfinderSpec(options.resolution, options.dashes)
        pathfinder.write_release(options.out, spec, options.data_seed, counts, options.processes)
    total = sum(counts.values())
    per_minute = round(60 * total / (time.perf_counter() - started))
    written = {"task": options.task, "out": options.out, "examples": total, "examples_per_minute": per_minute}
    print(json.dumps(written))


if __name__ == "__main__":
    start(main, "train.lra_data")
