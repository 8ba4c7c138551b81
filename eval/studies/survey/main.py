"""Every mechanism on small tasks of the Long Range Arena: python -m eval.survey --folder DIR [OPTIONS].

Trains the same network with each listed mechanism that has a bidirectional form, measures it on the test split
(`eval.lra`), and times the training steps of all mechanisms in turn (docs/lra.md; Tay et al. 2020, arXiv:2011.04006,
figure 3). The same command again trains only the runs that are missing or whose configuration has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.harness.output import picture_path
from eval.harness.pictures import save
from eval.studies.survey.options import SurveyOptions, survey_run, survey_runs
from eval.studies.survey.speed import kept_speeds, measure_speeds
from eval.studies.survey.table import collect, draw, markdown
from eval.studies.survey.training import finished, train_all
from train.cli.main import keep_programs
from train.cli.options import parse_options
from train.engine.errors import RunError


def main(argv: Sequence[str]) -> None:
    """Trains, measures and prints the table; see the module's text and --help."""
    options = parse_options(
        SurveyOptions(),
        argv,
        prog="python -m eval.survey",
        about="Compares all bidirectional mechanisms on small tasks of the Long Range Arena.",
    )
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
        kept = kept_speeds(options.folder, task, timed)
        if kept is None:
            measure_speeds(options.folder, task, timed, options.repeats)
            kept = kept_speeds(options.folder, task, timed)
        speeds[task] = kept or {}
    results = [{**measured, "network": run.name} for run in runs if (measured := finished(run)) is not None]
    cells = collect(results, speeds, options.mechanisms, options.tasks)
    print(markdown(cells, options.tasks))
    if picture is not None:
        save(draw(cells, options.tasks), picture)
    if failure is not None:
        raise failure
