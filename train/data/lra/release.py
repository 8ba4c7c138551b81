"""Generated data of the Long Range Arena, written in the layout of its release."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Literal

import tyro

from brl_jax.fields import Checked, Natural, Seed
from train.data.lra import listops, pathfinder
from train.data.lra.listops import ListOpsSpec
from train.data.lra.tasks import LraDataConfig, sizes
from train.engine.errors import UserError


@dataclasses.dataclass(frozen=True)
class ReleaseOptions(Checked):
    """What to write."""

    task: tyro.conf.Positional[Literal["listops", "pathfinder"]] = "listops"
    """listops or pathfinder."""
    out: str = ""
    """Name of a new folder."""
    train_examples: Natural = 0
    """Training examples; 0: 96,000 of listops, 16,000 of pathfinder."""
    valid_examples: Natural = 0
    """Validation examples; 0: 2,000."""
    test_examples: Natural = 0
    """Test examples; 0: 2,000."""
    data_seed: Seed = 0
    """Seed; the same examples for any number of processes."""
    resolution: int = 32
    """Pixels of a side of pathfinder's images: 32, 64 or 128 (path-x)."""
    dashes: int = pathfinder.HARD
    """Dashes of its long paths: 14, 9 or 6."""
    listops: ListOpsSpec = ListOpsSpec()
    """The expressions that listops generates."""
    processes: Natural = 0
    """Processes at a time; 0: one a core."""

    def without_effect(self) -> dict[str, str]:
        others = ("resolution", "dashes") if self.task == "listops" else ("listops",)
        return dict.fromkeys(others, f"on {self.task}")


def write_release(options: ReleaseOptions) -> None:
    """Writes the files, and prints a JSON object: how many examples, and how many a minute."""
    if not options.out:
        raise UserError("--out: expected the name of a new folder, got none")
    values = {name: value for name, value in vars(options).items() if name != "out"}
    try:
        config = LraDataConfig(**values, length=options.resolution**2)
    except ValueError as error:
        raise UserError(f"--{error}") from error
    counts, started = sizes(config), time.perf_counter()
    if options.task == "listops":
        listops.write_release(options.out, options.listops, options.data_seed, counts, options.processes)
    else:
        spec = pathfinder.PathfinderSpec(options.resolution, options.dashes)
        pathfinder.write_release(options.out, spec, options.data_seed, counts, options.processes)
    total = sum(counts.values())
    per_minute = round(60 * total / (time.perf_counter() - started))
    print(
        json.dumps(
            {"task": options.task, "out": options.out, "examples": total, "examples_per_minute": per_minute}
        )
    )
