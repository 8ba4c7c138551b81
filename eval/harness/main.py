"""The one evaluation command behind `python -m eval.lm`, `eval.lra` and the others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from etils import epath
from matplotlib.figure import Figure

from eval.harness.groups import compared
from eval.harness.pictures import picture_path, save
from eval.harness.runs import Run, open_run
from train.cli.main import keep_programs
from train.cli.options import parse_options
from train.engine.checkpoint import Checkpoints
from train.engine.config_file import flatten
from train.engine.errors import UserError, one_line
from train.engine.metrics import log
from train.engine.storage import as_os_errors, write_whole
from train.tasks.task import Task, find_runs, read_config


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What every evaluation lets its user choose."""

    workdir: str | tuple[str, ...] | None = None
    """Folder of a run."""
    checkpoint: str = "best"
    """best (the best evaluation while training), last, or a step."""


@dataclasses.dataclass(frozen=True)
class EvalOptions(RunOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    split: Literal["valid", "test"] = "test"
    """Which part of the data."""


@dataclasses.dataclass(frozen=True)
class TableOptions(RunOptions):
    """The options of an evaluation that shows many runs as a table."""

    table: str | None = None
    """A folder of runs, at any depth; prints a table of them."""
    picture: str | None = None
    """A .png file to draw."""


P = TypeVar("P", bound=RunOptions)


class Measured(NamedTuple):
    """The measures of a run, ready for JSON, and what else a picture of it needs."""

    result: dict[str, Any]
    example: Any = None


class Evaluation(Generic[P]):
    """Measures runs of some tasks. As it stands it prints the task's own measures of a split; subclasses add more.

    Attributes:
      tasks: those that the runs may be of.
      name: the command's module, "eval.lra". about: a line for --help.
      options: the options with their defaults.
      markdown, draw: make a table and a picture of the measures of many runs.
      kept: the file of a run's folder that keeps its standard measures, if any.
      drawn: what --picture draws, the table's runs or those of --workdir.
      of_unfinished: what the table has of a run with steps left to train.
    """

    kept: ClassVar[str | None] = None
    drawn: ClassVar[Literal["table", "workdir"]] = "table"
    of_unfinished: ClassVar[str] = "its best checkpoint so far"

    def __init__(
        self,
        tasks: Sequence[Task[Any, Any]],
        options: P,
        *,
        name: str,
        about: str,
        markdown: Callable[[Sequence[dict[str, Any]]], str] | None = None,
        draw: Callable[[Sequence[dict[str, Any]]], Figure] | None = None,
    ):
        self.tasks, self.options, self.name, self.about = tasks, options, name, about
        self._markdown, self._draw = markdown, draw

    def measure(self, run: Run, options: P) -> Measured:
        """The measures of a run.

        Raises:
          UserError: the run's data cannot be read.
        """
        assert isinstance(options, EvalOptions)
        return Measured(measure_split(run, options.split))

    def is_standard(self, options: P) -> bool:
        """Whether these options ask for the measures that are kept."""
        return options.checkpoint == "best"

    def markdown(self, results: Sequence[dict[str, Any]]) -> str:
        """A table of the measures of many runs."""
        assert self._markdown is not None
        return self._markdown(results)

    def draw(self, measured: Sequence[Measured]) -> Figure:
        """A picture of many runs."""
        assert self._draw is not None
        return self._draw([each.result for each in measured])

    def main(self, argv: Sequence[str]) -> None:
        """Prints one JSON object for each run of --workdir, or the table of the runs under --table; see --help.

        Raises:
          UserError: there is no such run or checkpoint, its data cannot be read, or the options don't fit.
        """
        options = parse_options(self.options, argv, prog=f"python -m {self.name}", about=self.about)
        keep_programs("")  # runs that differ in their seed only have the same programs
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
            measured = self._measure_all(table, options)
            print(self.markdown([each.result for each in measured]))
        else:
            measured = []
            for workdir in workdirs:
                measured.append(self.measure_and_keep(workdir, options))
                print(json.dumps(measured[-1].result), flush=True)
        if picture is not None:
            save(self.draw(measured), picture)

    def measure_and_keep(self, workdir: str, options: P) -> Measured:
        """Measures a run, and keeps the result in its folder where the options ask for the standard measures and the
        folder can be written.

        Raises:
          UserError: there is no such run or checkpoint, or its data cannot be read.
        """
        run = open_run(self.tasks, workdir, options.checkpoint)
        measured = self.measure(run, options)
        if self.kept is not None and self.is_standard(options):
            path = epath.Path(run.config.loop.workdir) / self.kept
            kept = {**measured.result, "measured_settings": _measured_settings(run.task, run.config)}
            try:
                with as_os_errors():
                    write_whole(path, json.dumps(kept, indent=1) + "\n")
            except OSError as error:  # a full disk, or a run of somebody else's
                log(f"{self.name}: the measures are not kept in {path}: {error.strerror or one_line(error)}")
        return measured

    def _measure_all(self, folder: str, options: P) -> list[Measured]:
        """The measures of all runs under a folder. Those that are kept are not measured again, unless the run has gone
        on since, so that its best checkpoint is another one, or with other held-out data."""
        paths = find_runs(self.tasks, Path(folder))
        if not paths:
            raise UserError(f"--table: no run of train.{self.tasks[0].name} under {folder}")
        measured = []
        for i, path in enumerate(paths):
            task, config = read_config(self.tasks, epath.Path(path) / "config.json")
            kept = self._kept(path, task, config) if self.is_standard(options) else None
            if kept is None:
                log(f"{self.name}: measuring {path}, run {i + 1} of {len(paths)}")
                try:
                    kept = self.measure_and_keep(str(path), options)
                except UserError as error:
                    # It has just begun, is damaged, lacks its data, or the options don't fit it.
                    log(f"{self.name}: {path} is left out: {error}")
                    continue
            # Of the run as it is here and now; the measures may have been kept elsewhere.
            self._mention_unfinished(path, config)
            kept.result.update(workdir=str(path), configuration=compared(task, config))
            measured.append(kept)
        if not measured:
            raise UserError(f"--table: none of the {len(paths)} runs under {folder} can be measured")
        return measured

    def _mention_unfinished(self, workdir: Path, config: Any) -> None:
        """Logs that a run of a table has steps left to train."""
        step = unfinished(workdir, config)
        if step is not None:
            log(
                f"{self.name}: {workdir} is at step {step} of {config.loop.steps}; "
                f"the table has {self.of_unfinished}"
            )

    def _kept(self, workdir: Path, task: Task[Any, Any], config: Any) -> Measured | None:
        """The measures in a run's folder; None if there are none, if they cannot be read, or if they are of another
        checkpoint than is the best one now, or of other settings."""
        if self.kept is None or not (workdir / self.kept).exists():
            return None
        try:
            result = json.loads((workdir / self.kept).read_text())
            step, settings = result["step"], result.pop("measured_settings")
        except (ValueError, KeyError, TypeError):
            return None
        if settings != _measured_settings(task, config):
            return None
        checkpoints = Checkpoints(workdir / "checkpoints")
        if checkpoints.steps() and checkpoints.choose("best")[0] != step:
            return None
        return Measured(result)


def _measured_settings(task: Task[Any, Any], config: Any) -> dict[str, Any]:
    """The settings on which the measures of a checkpoint depend, by dotted name: those that a resumed run may not
    change, and those of its data, of which it may change the number of test examples."""
    free = task.free_fields()
    return {
        name: value
        for name, value in flatten(task.to_json(config)).items()
        if name.startswith("data.") or not any(name == x or name.startswith(f"{x}.") for x in free)
    }


def unfinished(workdir: str | Path, config: Any) -> int | None:
    """The last checkpoint's step of a run that has steps left to train; None if it has none, or its `patience` has
    ended it."""
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints")
    steps = checkpoints.steps()
    if not steps or steps[-1] >= config.loop.steps:
        return None
    best = (checkpoints.meta(steps[-1]) or {}).get("best", {})
    return None if 0 < config.loop.patience <= best.get("misses", 0) else steps[-1]


def measure_split(run: Run, split: str) -> dict[str, Any]:
    """The measures of a run on a split of its data, and what was measured."""
    data = run.task.load(run.config, (split,))
    return {
        **run.task.measure(run.config, run.model, run.params, data, split),
        "step": run.step,
        "split": split,
    }
