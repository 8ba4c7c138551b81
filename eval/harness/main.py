"""The one evaluation command behind `python -m eval.lm`, `eval.lra` and the others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from etils import epath
from matplotlib.figure import Figure

from brl_jax.json_files import read_json
from eval.harness.groups import compared, settings_but
from eval.harness.options import EvalOptions, RunOptions, TableOptions
from eval.harness.output import Measured, emit, picture_path
from eval.harness.pictures import save
from eval.harness.runs import Run, open_run, unfinished
from train.cli.main import keep_programs
from train.cli.options import parse_options
from train.engine.checkpoint import Checkpoints
from train.engine.errors import UserError, reason
from train.engine.metrics import log
from train.engine.storage import as_os_errors, write_whole
from train.tasks.task import Task, find_runs, read_config

P = TypeVar("P", bound=RunOptions)

# Options that say which runs to measure and how to show them, but not what to measure.
_NOT_MEASURES = ("workdir", "table", "picture", "json")


def measure_split(run: Run, options: Any) -> dict[str, Any]:
    """The task's own measures of a split, with the step and the split."""
    assert isinstance(options, EvalOptions)
    data = run.task.load(run.config, (options.split,))
    measures = run.task.measure(run.config, run.model, run.params, data, options.split)
    return {**measures, "step": run.step, "split": options.split}


@dataclasses.dataclass
class Evaluation(Generic[P]):
    """A command that measures runs of some tasks, one by one or as a table.

    Attributes:
      tasks: those that the runs may be of.
      options: the options with their defaults.
      name: the command's module, "eval.lra". about: a line for --help.
      measure: the measures of a run, by default the task's own.
      markdown, draw: make a table and a picture of the measures of many runs.
      kept: the file of a run's folder that keeps its measures at the default options, if any. With "{split}" in its
        name there is one for each split.
      drawn: what --picture draws: the results of --table, or all that was measured of --workdir.
      of_unfinished: what the table shows of a run with steps left to train.
      select: the runs of a table that are worth comparing.
    """

    tasks: Sequence[Task[Any, Any]]
    options: P
    name: str
    about: str
    measure: Callable[[Run, P], dict[str, Any] | Measured] = measure_split
    markdown: Callable[[Sequence[dict[str, Any]]], str] | None = None
    draw: Callable[[Sequence[Any]], Figure] | None = None
    kept: str | None = None
    drawn: Literal["table", "workdir"] = "table"
    of_unfinished: str = "its best checkpoint so far"
    select: Callable[[list[Measured]], list[Measured]] = lambda measured: measured

    def main(self, argv: Sequence[str]) -> None:
        """Prints the measures of each run of --workdir, or the table of the runs under --table; see --help."""
        options = parse_options(self.options, argv, prog=f"python -m {self.name}", about=self.about)
        keep_programs("")  # runs that differ only in their seed compile the same programs
        workdirs = (options.workdir,) if isinstance(options.workdir, str) else options.workdir or ()
        table = picture = None
        if isinstance(options, TableOptions):
            table = options.table
            if bool(workdirs) == (table is not None):
                raise UserError("--workdir, --table: expected one of the two")
            if options.picture is not None and (table is None) == (self.drawn == "table"):
                raise UserError(f"--picture: expected with --{self.drawn} only")
            picture = picture_path(options.picture)
        elif not workdirs:
            raise UserError("--workdir: expected the folder of a run")
        if table is not None:
            assert self.markdown is not None
            measured = self.select(self._measure_all(table, options))
            print(self.markdown([each.result for each in measured]))
        else:
            measured = []
            for workdir in workdirs:
                measured.append(self.measure_and_keep(workdir, options))
                emit(measured[-1].result, options.json)
        if picture is not None:
            assert self.draw is not None
            save(
                self.draw([each.result for each in measured] if self.drawn == "table" else measured), picture
            )

    def measure_and_keep(self, workdir: str, options: P) -> Measured:
        """Measures a run, and keeps measures at the default options in its folder if that can be written."""
        run = open_run(self.tasks, workdir, options.checkpoint)
        found = self.measure(run, options)
        measured = found if isinstance(found, Measured) else Measured(found)
        for name, value in measured.result.items():
            if value != value:  # NaN, which JSON does not have
                raise UserError(
                    f"--workdir: {name} of {workdir} is NaN at step {run.step}, whose checkpoint may be damaged; "
                    "--checkpoint STEP measures another"
                )
        if self.kept is not None and self._is_standard(options):
            path = epath.Path(run.config.loop.workdir) / self._file(options)
            kept = {**measured.result, "measured_settings": _measured_settings(run.task, run.config)}
            try:
                with as_os_errors():
                    write_whole(path, json.dumps(kept, indent=1) + "\n")
            except OSError as error:  # a full disk, or somebody else's run
                log(f"{self.name}: the measures are not kept in {path}: {reason(error)}")
        return measured

    def _is_standard(self, options: P) -> bool:
        """Whether these options ask for the measures that are kept."""
        omitted = (*_NOT_MEASURES, "split") if "{split}" in (self.kept or "") else _NOT_MEASURES
        names = [field.name for field in dataclasses.fields(options) if field.name not in omitted]
        return all(getattr(options, name) == getattr(self.options, name) for name in names)

    def _file(self, options: P) -> str:
        """The file that keeps these measures."""
        return (self.kept or "").format(split=getattr(options, "split", ""))

    def _measure_all(self, folder: str, options: P) -> list[Measured]:
        """The measures of all runs under a folder.

        Kept measures are used as they are, unless the run has gone on to a better checkpoint or other held-out data.
        """
        paths = find_runs(self.tasks, Path(folder))
        if not paths:
            raise UserError(f"--table: no run of train.{self.tasks[0].name} under {folder}")
        measured = []
        for i, path in enumerate(paths):
            task, config = read_config(self.tasks, epath.Path(path) / "config.json")
            kept = self._kept(path, task, config) if self._is_standard(options) else None
            if kept is None:
                log(f"{self.name}: measuring {path}, run {i + 1} of {len(paths)}")
                try:
                    kept = self.measure_and_keep(str(path), options)
                except UserError as error:
                    # The run has just begun, is damaged, lacks its data, or does not fit the options.
                    log(f"{self.name}: {path} is left out: {error}")
                    continue
            step = unfinished(path, config)
            if step is not None:
                log(
                    f"{self.name}: {path} is at step {step} of {config.loop.steps}; the table has {self.of_unfinished}"
                )
            # The run's folder may have moved since its measures were kept.
            kept.result.update(workdir=str(path), configuration=compared(task, config))
            measured.append(kept)
        if not measured:
            raise UserError(f"--table: none of the {len(paths)} runs under {folder} can be measured")
        return measured

    def _kept(self, workdir: Path, task: Task[Any, Any], config: Any) -> Measured | None:
        """The measures in a run's folder; None if they are missing, damaged, of another checkpoint or settings, or of
        an earlier version, which did not measure all that the table shows."""
        if self.kept is None or not (workdir / self.kept).exists():
            return None
        try:
            result = read_json(workdir / self.kept, {"step": int, "measured_settings": dict})
        except (OSError, ValueError):
            return None
        step, settings = result["step"], result.pop("measured_settings")
        if settings != _measured_settings(task, config):
            return None
        checkpoints = Checkpoints(workdir / "checkpoints")
        if checkpoints.steps() and checkpoints.choose("best")[0] != step:
            return None
        assert self.markdown is not None
        try:
            self.markdown([result | {"configuration": compared(task, config)}])
        except LookupError:
            return None
        return Measured(result)


def _measured_settings(task: Task[Any, Any], config: Any) -> dict[str, Any]:
    """The settings that the measures of a checkpoint depend on: those that a resumed run may not change, and all of its
    data's."""
    return settings_but(task, config, [name for name in task.free_fields() if not name.startswith("data.")])
