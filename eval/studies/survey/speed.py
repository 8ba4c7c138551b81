"""Steps a second and memory of a survey's training steps, measured apart from the training by `eval.speed.measure`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath
from rich.console import Console
from rich.progress import Progress

from brl_jax.json_files import read_json
from eval.speed.measure import Case, measure, sigterm_interrupts
from eval.speed.training import classifier
from eval.studies.survey.options import SurveyRun
from train.engine.config_file import flatten
from train.engine.storage import write_whole
from train.tasks.lra import LRA

_SECONDS = 20.0


def kept_speeds(folder: str, task: str, runs: Sequence[SurveyRun]) -> dict[str, dict[str, Any]] | None:
    """What was measured of these runs' training steps, by network; None unless all were measured together."""
    try:
        kept = read_json(_path(folder, task), {"networks": dict, "rows": list[dict]})
    except (OSError, ValueError):
        return None
    wanted = _networks(runs)
    if any(kept["networks"].get(name) != network for name, network in wanted.items()):
        return None
    return {row["name"]: row for row in kept["rows"] if row.get("name") in wanted}


def measure_speeds(folder: str, task: str, runs: Sequence[SurveyRun], repeats: int) -> None:
    """Measures the training steps of these runs of a task, which differ only in their network, and keeps the result in
    the survey's folder once all are measured."""
    cases = [Case(run.name, 1, functools.partial(classifier, run.config, inference=False)) for run in runs]
    length = runs[0].config.data.padded_lengths[-1]
    rows: list[dict] = []
    limits: dict[str, Any] = {"repeats": repeats, "patience": _SECONDS, "limit": float("inf")}
    with sigterm_interrupts(), Progress(console=Console(stderr=True), transient=True) as progress:
        measure(cases, length, rows, progress, label=task, **limits)
    path = _path(folder, task)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"networks": _networks(runs), "rows": rows}
    write_whole(epath.Path(path), json.dumps(kept, indent=1) + "\n")


def _path(folder: str, task: str) -> Path:
    return Path(folder) / task / "speed.json"


def _networks(runs: Sequence[SurveyRun]) -> dict[str, Any]:
    """What a training step depends on, by network."""
    parts = ("loop.batch", "loop.accumulation", "model.", "optimizer.", "data.buckets", "data.length")
    return {
        run.name: {
            name: value
            for name, value in flatten(json.loads(json.dumps(LRA.to_json(run.config)))).items()
            if name.startswith(parts)
        }
        for run in runs
    }
