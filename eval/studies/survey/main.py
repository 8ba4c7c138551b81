"""Every mechanism on small tasks of the Long Range Arena: python -m eval.survey --folder DIR [OPTIONS].

Trains the same network with each listed mechanism that has a bidirectional form, measures it on the test split
(`eval.lra`), and times the training steps of all mechanisms in turn (docs/lra.md; Tay et al. 2020, arXiv:2011.04006,
figure 3). The same command again trains only the runs that are missing or whose configuration has changed.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath

from brl_jax.json_files import read_json
from eval.harness.options import command
from eval.harness.output import picture_path
from eval.harness.pictures import save
from eval.harness.runs import unfinished
from eval.speed.measure import Case, measure, sigterm_interrupts
from eval.speed.training import candidate
from eval.studies.survey.options import SurveyOptions, SurveyRun, survey_run, survey_runs
from eval.studies.survey.table import collect, draw, markdown
from eval.tasks.lra import KEPT, measure_run
from train.cli.main import keep_programs, run_task
from train.data.lra.tasks import open_source
from train.engine.config_file import flatten, read_values
from train.engine.errors import RunError, UserError
from train.engine.metrics import log
from train.engine.storage import write_whole
from train.tasks.lra import LRA

# Fields of a configuration that say where things are: a folder that was moved has the same runs.
_PLACES = ("loop.workdir", "data.cache_dir")


@command(
    SurveyOptions(),
    "eval.survey",
    "Compares all bidirectional mechanisms on small tasks of the Long Range Arena.",
)
def main(options: SurveyOptions) -> None:
    picture = picture_path(options.picture)
    runs = survey_runs(options)
    failure = None
    keep_programs("")  # runs that differ only in their seed compile the same programs
    try:
        train_all(runs)
    except RunError as error:
        failure = error
    speeds: dict[str, dict[str, Any]] = {}
    for task in options.tasks:
        timed = [survey_run(options, task, name, options.seeds[0]) for name in options.mechanisms]
        rows = kept_speeds(timed)
        speeds[task] = measure_speeds(timed, options.repeats) if rows is None else rows
    results = [{**measured, "network": run.name} for run in runs if (measured := finished(run)) is not None]
    cells = collect(results, speeds, options.mechanisms, options.tasks)
    print(markdown(cells, options.tasks))
    if picture is not None:
        save(draw(cells, options.tasks), picture)
    if failure is not None:
        raise failure


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
    """Trains and measures the runs that are not finished; Ctrl-C and SIGTERM save the one that runs. Raises RunError
    after all of them if the loss of some was not finite."""
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


def kept_speeds(runs: Sequence[SurveyRun]) -> dict[str, dict[str, Any]] | None:
    """What was measured of these runs' training steps, by network; None unless all were measured together."""
    try:
        kept = read_json(_speed_file(runs), {"networks": dict, "rows": list[dict]})
    except (OSError, ValueError):
        return None
    wanted = networks(runs)
    if any(kept["networks"].get(name) != network for name, network in wanted.items()):
        return None
    return {row["name"]: row for row in kept["rows"] if row.get("name") in wanted}


def measure_speeds(runs: Sequence[SurveyRun], repeats: int) -> dict[str, dict[str, Any]]:
    """Measures the training steps of these runs of a task, which differ only in their network, and keeps the result in
    the survey's folder once all are measured."""
    cases = [
        Case(run.name, 1, functools.partial(candidate, LRA, run.config, inference=False)) for run in runs
    ]
    length = runs[0].config.data.padded_lengths[-1]
    rows: list[dict] = []
    limits: dict[str, Any] = {"repeats": repeats, "patience": 20.0, "limit": float("inf")}
    with sigterm_interrupts():
        measure(cases, length, rows, label=runs[0].task, **limits)
    path = _speed_file(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(epath.Path(path), json.dumps({"networks": networks(runs), "rows": rows}, indent=1) + "\n")
    return {row["name"]: row for row in rows}


def _speed_file(runs: Sequence[SurveyRun]) -> Path:
    return Path(runs[0].config.loop.workdir).parents[1] / "speed.json"


def networks(runs: Sequence[SurveyRun]) -> dict[str, Any]:
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
