"""Trains a survey's runs, unless they are finished with the same configuration."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brl_jax.json_files import read_json
from eval.harness.runs import unfinished
from eval.studies.survey.options import SurveyRun
from eval.tasks.lra import KEPT, measure_run
from train.cli.main import run_task
from train.data.lra.tasks import open_source
from train.engine.config_file import read_values
from train.engine.errors import RunError, UserError
from train.engine.metrics import log
from train.tasks.lra import LRA

# Fields of a configuration that say where things are: a folder that was moved has the same runs.
_PLACES = ("loop.workdir", "data.cache_dir")


def finished(run: SurveyRun) -> dict[str, Any] | None:
    """The measures of a run on the test split; None unless it was trained to its end and measured as configured."""
    folder = Path(run.config.loop.workdir)
    try:
        config = read_values(folder / "config.json")
        measured = read_json(folder / KEPT, dict)
    except (OSError, ValueError):
        return None
    # A run with steps left may have been measured by eval.lra.
    is_other = LRA.differences(config, run.config, _PLACES) or unfinished(folder, run.config) is not None
    return None if is_other else measured


def train_all(runs: Sequence[SurveyRun]) -> None:
    """Trains and measures the runs that are not finished; Ctrl-C and SIGTERM save the one that runs."""
    missing = [run for run in runs if finished(run) is None]
    log(f"survey: {len(runs) - len(missing)} of {len(runs)} runs are finished")
    for task, data in {run.task: run.config.data for run in missing}.items():
        try:
            open_source(data)  # now, and not after hours of another task
        except UserError as error:
            raise UserError(str(error).replace("--data_dir", f"--{task}_dir")) from error
    failed = []
    for number, run in enumerate(missing, 1):
        where = run.config.loop.workdir
        log(f"survey: run {number} of {len(missing)}: {run.task}, {run.name}, seed {run.config.loop.seed}")
        _clear(run)
        try:
            run_task(LRA, run.config)
        except RunError as error:
            log(f"survey: {where}: {error}")
            failed.append(where)
            continue
        measure_run(where)
    if failed:
        raise RunError(f"no result of {', '.join(failed)}: see above")


def _clear(run: SurveyRun) -> None:
    """Removes a run of another configuration, or an outdated measure."""
    folder = Path(run.config.loop.workdir)
    try:
        before = read_values(folder / "config.json")
    except UserError:
        return  # it is missing, or damaged, which training reports
    if before.get("task") != LRA.name:
        raise UserError(f"--folder: {folder} holds a run of another task than train.lra's")
    if LRA.differences(before, run.config):
        log(f"survey: {folder} is of another configuration and is trained again")
        shutil.rmtree(folder)
    else:
        (folder / KEPT).unlink(missing_ok=True)
