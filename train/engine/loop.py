"""The training loop, the same for every task. It resumes a run where it stopped, and stops so that it can be resumed.

The metrics of a step are read after the next step has been handed to the device, so that the device never waits.
Everything that a step depends on (parameters, optimiser, random key, carried memory, input position) is in a
checkpoint, so that a run that was stopped and started again computes, bit for bit, what it would have computed without
the stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from etils import epath
from jax.sharding import Mesh

from brl_jax.sharding import MeshConfig, make_mesh
from train.engine.checkpoint import Checkpoints
from train.engine.config import LoopConfig
from train.engine.config_file import write_json
from train.engine.errors import RunError, Stopped, UserError, one_line
from train.engine.hosts import ending_together, is_lead, preempted
from train.engine.mesh import place_batch, training_programs
from train.engine.metrics import MetricsLog, Reporter, RunReport, log
from train.engine.optimizer import OptimizerConfig
from train.engine.profiling import Profiler
from train.engine.step import Batch, Objective, TrainState, make_eval_step, means, num_rows, num_tokens
from train.engine.storage import as_os_errors
from train.engine.throughput import Meter
from train.engine.watchdog import WATCHDOG


class Stream(Protocol):
    """Endless training batches whose position can be saved."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class HeldOut(Protocol):
    """One pass over held-out data, in batches of `batch` rows; `num_bytes` is the number of bytes of text that its
    targets stand for (None: they are not text), `digest` a hash of the data (None: the configuration or the training
    stream's state says which they are)."""

    @property
    def batch(self) -> int: ...
    @property
    def num_bytes(self) -> int | None: ...
    @property
    def digest(self) -> str | None: ...
    def __iter__(self) -> Iterator[Batch]: ...


class Trained(NamedTuple):
    """A run that is done: its last state, what its last evaluation measured (`held_out_metrics`), and how fast this
    process trained (`train.engine.throughput.Meter`); both are empty where there was nothing left to do."""

    state: TrainState
    measured: dict[str, float]
    rates: dict[str, float]


class Signals:
    """A context manager that records SIGTERM and Ctrl-C instead of ending the process; a second Ctrl-C ends it. With
    several processes it records nothing: `train.engine.hosts.preempted` reports to all of them at the same step."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ():
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: object) -> None:
        self.received = signum
        # From here on the system's own handler, which runs without Python: it works in the middle of a long step.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The progress bar hides the cursor, and a second Ctrl-C would leave it hidden.
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
        os.write(2, f"{show_cursor}\nfinishing the step and saving; Ctrl-C again stops at once\n".encode())


def evaluate(
    eval_step: Callable[..., Any],
    objective: Objective,
    params: Any,
    held_out: Iterable[Batch],
    interrupted: Callable[[], bool] = lambda: False,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> dict[str, float] | None:
    """Sums over held-out data, with memory carried from batch to batch: "loss" (nats), "weight" and the objective's
    averages.

    Args:
      eval_step: jitted `make_eval_step(objective)`.
      params: the parameters.
      held_out: batches, all with the same number of rows.
      interrupted: called before each batch; where it returns True the result is None.
      place: puts a batch on the devices.
    """
    memory = None
    sums: list[dict[str, Any]] = []
    for i, batch in enumerate(held_out):
        if interrupted():
            return None
        batch = place(batch)
        if i == 0:
            rows = num_rows(batch)
            memory = jax.jit(lambda rows=rows: objective.shard_memory(objective.init_memory(rows), rows))()
        added, memory = eval_step(params, memory, batch)
        sums.append(added)
    # Summed as Python floats, in double precision: a long text has more tokens than float32 can count.
    return {name: sum(float(added[name]) for added in sums) for name in sums[0]}


def held_out_metrics(sums: Mapping[str, float], num_bytes: int | None) -> dict[str, float]:
    """val_loss in nats per target, the averages as val_NAME, and for a text val_bits_per_byte, which is comparable
    between tokenizers (left out where the targets stand for no byte)."""
    metrics = {f"val_{name}": value for name, value in means(sums).items()}
    if num_bytes:
        metrics["val_bits_per_byte"] = sums["loss"] / math.log(2) / num_bytes
    return metrics


@dataclasses.dataclass
class _Best:
    """The best held-out score so far, and the number of evaluations since."""

    score: float | None = None
    misses: int = 0

    def is_ended_by(self, score: float | None, patience: int) -> bool:
        """Whether this next score is the last one that `patience` allows."""
        if score is None or self.score is None or score < self.score:
            return False
        return 0 < patience <= self.misses + 1

    def add(self, score: float) -> None:
        if self.score is None or score < self.score:
            self.score, self.misses = score, 0
        else:
            self.misses += 1


def resuming(step: int, steps: int) -> str:
    """The line about a run that begins at `step`, its newest checkpoint, and ends at `steps`."""
    if step < steps:
        return f"resuming from step {step} of {steps}"
    return f"nothing is left to train: the run is at step {step}, and --steps is {steps}"


def train(
    objective: Objective,
    loop: LoopConfig,
    optimizer_config: OptimizerConfig,
    *,
    config: Mapping[str, Any],
    differences: Callable[[Mapping[str, Any]], Sequence[str]] = lambda old: (),
    stream: Stream,
    held_out: HeldOut,
    full_held_out: HeldOut | None = None,
    mesh: Mesh | None = None,
    introduction: Sequence[str] = (),
    report: RunReport | None = None,
) -> Trained:
    """Trains until `loop.steps`, from the newest whole checkpoint in the run's folder.

    Args:
      objective: what is trained.
      loop, optimizer_config: the settings.
      config: the whole configuration as JSON; kept in config.json and in each checkpoint.
      differences: what of a checkpoint's configuration differs from this one's and must not, in words.
      stream: the training batches; closed at the end.
      held_out, full_held_out: the data of the evaluations on the way, and of the last one (by default the same).
      mesh: what the arrays are sharded over; by default all devices in the default shape. The streams give the rows of
        this process (`train.engine.mesh.host_rows`).
      introduction: lines that are logged before the first step, once the run's folder is known to serve.
      report: what shows the progress; by default a bar on a terminal, otherwise a line now and then.

    Returns:
      The last state and the last measures.

    Raises:
      UserError: the run's checkpoint is of another configuration, none is whole, or the folder cannot be written.
      RunError: the loss is no longer finite, or a checkpoint or the metrics can't be written; names the last good
        checkpoint.
      Stopped: a signal came; the run is saved.
    """
    mesh = make_mesh(MeshConfig()) if mesh is None else mesh
    with contextlib.closing(stream), jax.set_mesh(mesh), ending_together(loop.workdir):
        return _train(
            objective,
            loop,
            optimizer_config,
            config=config,
            differences=differences,
            stream=stream,
            held_out=held_out,
            full_held_out=held_out if full_held_out is None else full_held_out,
            mesh=mesh,
            introduction=introduction,
            report=report,
        )


def _train(
    objective: Objective,
    loop: LoopConfig,
    optimizer_config: OptimizerConfig,
    *,
    config: Mapping[str, Any],
    differences: Callable[[Mapping[str, Any]], Sequence[str]],
    stream: Stream,
    held_out: HeldOut,
    full_held_out: HeldOut,
    mesh: Mesh,
    introduction: Sequence[str],
    report: RunReport | None,
) -> Trained:
    eval_step = jax.jit(make_eval_step(objective))
    checkpoints = Checkpoints(epath.Path(loop.workdir) / "checkpoints", keep=loop.keep_checkpoints, log=log)

    programs = training_programs(mesh, objective, optimizer_config, loop)
    state, meta = _begin(loop, differences, programs.fresh, objective.start, checkpoints)
    step = int(state.step)
    # The line of a step is written when its evaluation is done; a run that was stopped before that left the line in
    # the checkpoint.
    line: dict[str, Any] | None = None
    best = _Best()
    measured: dict[str, float] = {}
    if meta is not None:
        stream.set_state(meta["position"])
        if None not in (before := meta.get("held_out"), held_out.digest) and before != held_out.digest:
            raise UserError(
                f"--workdir: the run in {loop.workdir} was started with other held-out data, by which its checkpoints "
                "are compared; expected the same data, or another --workdir"
            )
        line = meta["unfinished"]
        best = _Best(**meta.get("best", {}))
    try:
        if is_lead():
            with as_os_errors():
                write_json(config, epath.Path(loop.workdir) / "config.json")
        metrics_log = MetricsLog(
            loop.workdir,
            last_step=step - 1 if line else step,
            tensorboard=loop.tensorboard,
            wandb_config=config if loop.log == "wandb" else None,
        )
    except OSError as error:
        raise UserError(
            f"--workdir: cannot write under {loop.workdir}: {error.strerror or one_line(error)}"
        ) from error

    for text in introduction:
        log(text)
    if meta is not None:
        log(resuming(step, loop.steps))
    meter = Meter(objective, mesh.devices.flat[0].device_kind, mesh.devices.size)
    profiler = Profiler(loop.profile, loop.workdir)
    with (
        WATCHDOG.watching(loop.workdir),
        contextlib.closing(profiler),
        contextlib.closing(checkpoints),
        contextlib.closing(metrics_log),
        Signals() as signals,
    ):
        # Innermost, because a process that leaves the other contexts waits for the other processes.
        with report or Reporter(loop.steps, step) as reporter, ending_together(loop.workdir):

            def interrupted() -> bool:
                WATCHDOG.alive()
                return bool(signals.received)

            def report_step(line: dict[str, Any]) -> None:
                try:
                    metrics_log.write(line)
                except OSError as error:
                    checkpoints.wait()
                    raise RunError(
                        f"cannot write metrics under {loop.workdir}: {one_line(error)}; {checkpoints.last_good}"
                    ) from error
                reporter.step(line)

            reader = _MetricsReader(checkpoints, meter)
            while line is not None or step < loop.steps:
                if line is None and loop.patience and best.misses >= loop.patience:
                    log(f"step {step}: no better for {best.misses} evaluations; the run ends here")
                    break
                if line is None:
                    with meter.input():
                        batch = place_batch(mesh, next(stream), loop.batch)
                    profiler.before(step + 1)
                    state, metrics = programs.step(state, batch)
                    step += 1
                    profiler.after(step, metrics)
                    WATCHDOG.alive()
                    if preempted(step):
                        signals.received = signal.SIGTERM
                    flops = meter.flops(state.params, batch)
                    finished = reader.exchange(step, metrics, num_tokens(batch), flops)
                    if finished is not None:
                        report_step(finished)
                evaluating = line is not None or step % loop.eval_every == 0 or step == loop.steps
                if not (evaluating or step % loop.checkpoint_every == 0 or signals.received):
                    continue

                line = line or reader.read()
                whole, score = True, None
                if evaluating:
                    reporter.busy("evaluating")

                    def sums_of(data: HeldOut, params: Any = state.params) -> dict[str, float] | None:
                        place = functools.partial(place_batch, mesh, rows=data.batch)
                        return evaluate(eval_step, objective, params, data, interrupted, place)

                    data, sums = held_out, sums_of(held_out)
                    if sums is not None:
                        # Checkpoints are compared on the same data, the last one too.
                        score = _score(objective, held_out_metrics(sums, held_out.num_bytes))
                        is_last = step == loop.steps or best.is_ended_by(score, loop.patience)
                        if is_last and full_held_out is not held_out:
                            data, sums = full_held_out, sums_of(full_held_out)
                    if sums is not None:
                        measured = held_out_metrics(sums, data.num_bytes)
                        reader.check(step, measured)
                        line |= measured
                    else:
                        whole, score = False, None
                if score is not None:
                    best.add(score)
                if whole:
                    report_step(line)
                reporter.busy("saving")
                meta = {
                    "config": config,
                    "position": stream.get_state(),
                    "unfinished": None if whole else line,
                    "best": dataclasses.asdict(best),
                    "held_out": held_out.digest,
                }
                metrics_log.sync()  # the lines up to a checkpoint are there before it is
                checkpoints.save(step, state, meta, score=score)
                line = None
                reader.restart_clock()
                if signals.received:
                    break
        checkpoints.wait()
        if not metrics_log.sync():
            raise RunError(
                f"cannot write metrics.jsonl under {loop.workdir}; {checkpoints.last_good}; the same command on this "
                "machine writes it"
            )
        if signals.received:
            raise Stopped(
                f"stopped after step {step} of {loop.steps}; {checkpoints.last_good}; the same command "
                "resumes from there",
                signals.received,
            )
    return Trained(state, measured, meter.summary())


def _score(objective: Objective, line: Mapping[str, Any]) -> float | None:
    """The value by which checkpoints are compared, the lower the better; None where nothing was measured."""
    value = line.get(f"val_{objective.best}")
    return value if value is None or objective.best == "loss" else -value


def another_configuration(workdir: str, differing: Sequence[str]) -> UserError:
    """The error of a command whose folder has a run that differs in what `differing` names, in words."""
    return UserError(
        f"--workdir: the run in {workdir} is of another configuration: {', '.join(differing)}; "
        "expected the same, or another --workdir"
    )


def _begin(
    loop: LoopConfig,
    differences: Callable[[Mapping[str, Any]], Sequence[str]],
    fresh: Callable[[], TrainState],
    start: Callable[[Any], Any],
    checkpoints: Checkpoints,
) -> tuple[TrainState, dict[str, Any] | None]:
    """The state to start from, and what its checkpoint holds besides the state (None for a new run)."""

    def check(meta: dict[str, Any]) -> None:
        differing = differences(meta["config"])
        if differing:
            raise another_configuration(loop.workdir, differing)

    # Waited for as a whole: on a CPU, reading one array of a program that found no memory for another waits for ever.
    state = jax.block_until_ready(fresh())
    restored = checkpoints.restore(state, check)
    if restored is None:
        return state.replace(params=start(state.params)), None
    return restored.state, restored.meta


class _MetricsReader:
    """Reads the metrics of a step while the next one runs, and raises where they are not finite.

    Args:
      checkpoints: the run's; an error names the last good one.
      meter: measures the speed between two readings.
    """

    def __init__(self, checkpoints: Checkpoints, meter: Meter):
        self._checkpoints, self._meter = checkpoints, meter
        self._waiting: tuple[int, Mapping[str, Any], int, float] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since the last reading from the speed of the next step."""
        self._clock = time.perf_counter()

    def exchange(
        self, step: int, metrics: Mapping[str, Any], tokens: int, flops: float
    ) -> dict[str, Any] | None:
        """Takes the metrics of a step that was just started, its tokens and its operations; returns the metrics of the
        step before, unless they were read already."""
        line = None if self._waiting is None else self.read()
        self._waiting = step, metrics, tokens, flops
        return line

    def check(self, step: int, measured: Mapping[str, float]) -> None:
        """Raises RunError where a number isn't finite."""
        for name, value in measured.items():
            if not math.isfinite(value):
                self._checkpoints.wait()
                raise RunError(f"step {step}: {name} is {value}; {self._checkpoints.last_good}")

    def read(self) -> dict[str, Any]:
        """Waits for the metrics that were taken last. Raises RunError where the loss or the gradient isn't finite."""
        assert self._waiting is not None
        (step, metrics, tokens, flops), self._waiting = self._waiting, None
        line = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        self.check(step, {name: line[name] for name in ("loss", "grad_norm")})
        now = time.perf_counter()
        line |= self._meter.step(tokens, flops, now - self._clock)
        self._clock = now
        return line
