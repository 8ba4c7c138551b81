"""The command behind `python -m train.lm`, `train.lra` and the others."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import time
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from train.cli.options import given_options, parse, parse_onto
from train.cli.summary import beginning, ending, parameters_in_words
from train.data.dataset import forget_unstarted
from train.engine.batch import HeldOut, Stream, num_tokens
from train.engine.checkpoint import Checkpoints
from train.engine.config_file import flatten, option_name, read_values
from train.engine.errors import UserError
from train.engine.folder import alone_in
from train.engine.hosts import (
    HostsConfig,
    check_shared,
    ending_together,
    gather,
    is_lead,
    join,
    lead_first,
)
from train.engine.loop import another_configuration, train
from train.engine.metrics import RunReport, announce, log
from train.engine.storage import check_client, check_writable, user_cache
from train.engine.throughput import in_words
from train.tasks.task import Task, task_and_config

# Options that a command answers instead of training, and those of a run's start, which name its network.
_NOT_RESUMED = {"help", "help_all", "presets", "version", "from_hf", "convert_from"}


def train_main(tasks: Sequence[Task[Any, Any]], argv: Sequence[str], *, name: str) -> None:
    """Trains as the command line (without the program's name) says, with the presets of these tasks; the first task has
    the default one."""
    presets = {preset: config for task in tasks for preset, config in task.presets.items()}
    prog, about = f"python -m {name}", tasks[0].about
    config = _resumed(tasks, argv, prog=prog, about=about)
    if config is None:
        config = parse(presets, tasks[0].default_preset, argv, prog=prog, about=about)
    run_task(next(task for task in tasks if task.config_class is type(config)), config)


def _resumed(tasks: Sequence[Task[Any, Any]], argv: Sequence[str], *, prog: str, about: str) -> Any:
    """The configuration of the run in the folder that argv names, with the options of argv.

    None starts a new run: the folder is empty, argv names a preset or another start or asks for help, or the run has no
    checkpoint and argv changes an option that a resumed run must keep.

    Raises:
      UserError: an option is wrong, or argv is the folder alone and nothing says what its run was started with.
    """
    options = set(given_options(argv))
    if "workdir" not in options or not argv[0].startswith("--") or "-h" in argv or options & _NOT_RESUMED:
        return None
    words = [part for word in argv for part in word.split("=", 1 if word.startswith("--") else 0)]
    workdir = dict(itertools.pairwise(words)).get("--workdir")
    if not workdir:
        return None
    check_client("--workdir", workdir)
    try:
        values = _started(workdir)
        if values is None:
            return None
        task, config = task_and_config(tasks, values, f"{workdir}/config.json")
    except UserError:
        if options == {"workdir"}:
            raise
        return None
    free = {option_name(path) for path in task.free_fields()}
    if not _steps(workdir) and any(option.partition(".")[0] not in free for option in options):
        return None  # the command that failed before its first checkpoint may have had the wrong options
    # config.json has the number and the address of the process that wrote it.
    return parse_onto(dataclasses.replace(config, hosts=HostsConfig()), argv, prog=prog, about=about)


def _started(workdir: str) -> dict[str, Any] | None:
    """What the run in a folder was started with: its config.json or, if that is missing or damaged, what its newest
    checkpoint says. None if there is neither.

    Raises:
      UserError: config.json is damaged and no checkpoint can be read.
    """
    checkpoints = Checkpoints(epath.Path(workdir) / "checkpoints")
    try:
        return read_values(epath.Path(workdir) / "config.json")
    except UserError as error:
        for meta in map(checkpoints.meta, reversed(checkpoints.steps())):
            if meta is not None:
                return dict(meta["config"])
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise


def _steps(workdir: str) -> list[int]:
    """The steps of the checkpoints in a run's folder. Raises UserError if they cannot be read."""
    return Checkpoints(epath.Path(workdir) / "checkpoints").steps()


def run_task(task: Task[Any, Any], config: Any, report: RunReport | None = None) -> None:
    """Trains the configured model, from the newest checkpoint in its folder, and logs the result."""
    check_client("--workdir", config.loop.workdir)
    announce(f"{task.name}: starting in {config.loop.workdir}")
    join(config.hosts)
    keep_programs(config.loop.compilation_cache)
    with ending_together(config.loop.workdir), alone_in(config.loop.workdir):
        before = None if _steps(config.loop.workdir) else task.before(config)
        if before is not None:
            _run_task(*before, report)
        _run_task(task, config, report)


def _run_task(task: Task[Any, Any], config: Any, report: RunReport | None) -> None:
    check_shared(config.loop.workdir, task.to_json(config))
    _check_folder(task, config)
    mesh = task.open_mesh(config)
    if task.is_sized_by_data:
        data = _load(task, config)
        config = task.sized(config, data)
        model = task.build(config)
    else:  # checked first, because making the data may take minutes
        config = task.sized(config)
        model = task.build(config)
        data = _load(task, config)
    streams = task.streams(config, data, mesh)
    check_alike(streams.training, streams.held_out)
    objective = task.objective(model, config)
    introduction = beginning(
        config,
        parameters=parameters_in_words(objective),
        mesh=mesh,
        data=task.describe_data(config, data),
        tokens=num_tokens(task.batch_shapes(config, config.loop.batch)),
    )
    began = time.monotonic()
    state, measured, rates = train(
        objective,
        config.loop,
        config.optimizer,
        config={"network": type(model).__name__, **task.to_json(config)},
        differences=lambda old: task.differences(old, config),
        stream=streams.training,
        held_out=streams.held_out,
        full_held_out=streams.full_held_out,
        mesh=mesh,
        introduction=introduction,
        report=report,
    )
    seconds = time.monotonic() - began
    if rates:
        log(in_words(rates))
    log(ending(config.loop, step=int(state.step), seconds=seconds, measured=measured))
    task.finish(config, data, model, state.params, mesh)
    for words in task.next_commands(config, data):
        log(f"next: python -m {shlex.join(words)}")


def keep_programs(folder: str) -> None:
    """Keeps compiled programs for the next start: in the given folder, else in JAX's, else in the user's cache.
    "none" keeps nothing, nor do several processes on CPUs.
    """
    # There only the first process would find its programs again. It waits for the others 30 seconds, and not for as
    # long as they compile.
    if folder == "none" or (jax.distributed.is_initialized() and jax.default_backend() == "cpu"):
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if folder:
        check_writable("--compilation_cache", folder)
    if folder or jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", folder or str(user_cache() / "xla"))


def check_alike(stream: Stream, held_out: HeldOut) -> None:
    """Refuses processes with different data, such as files of the same name but other contents on their hosts.

    Raises:
      UserError: a process has other training or held-out data than the first; raised by all processes.
    """
    first, *others = gather({**stream.get_state(), "held_out": held_out.digest})
    differing = [number for number, state in enumerate(others, 1) if state != first]
    if differing:
        numbers = ", ".join(map(str, differing))
        raise UserError(
            f"--data: process {numbers} of {len(others) + 1} has other data than the first; expected the same "
            "on all hosts"
        )


def _check_folder(task: Task[Any, Any], config: Any) -> None:
    """Refuses the folder of another program, of another task's run or of a run on other data, before these are read and
    a tokenizer or anything else is written into it.
    """
    workdir = config.loop.workdir
    values = _started(workdir)
    if values is None:
        return
    if values["task"] != task.name:
        raise another_configuration(workdir, [f"task {values['task']} -> {task.name}"])
    started, asked = flatten(values), flatten(task.to_json(config))
    for name in ("data", "data_dir"):
        old, new = (each.get(f"data.{name}") for each in (started, asked))
        if f"data.{name}" in started and old != new and _steps(workdir):
            raise UserError(
                f"--{name}: the run in {workdir} was started with {old!r}, got {new!r}; expected the same, or another "
                "--workdir"
            )


def _load(task: Task[Any, Any], config: Any) -> Any:
    """The data of a run. The first process makes what is missing, and the others wait for it."""
    with lead_first():
        if is_lead():
            forget_unstarted(config.loop.workdir)
        return task.load(config, ("train", "valid"))
