"""The training loop, the same for every task. It resumes a run where it stopped, and stops so that it can be resumed.

`train` opens the run's folder and contains the loop; `_Run` has what happens at a step: `take_steps`, and at some steps
`finish_step`, which evaluates, reports and saves. The metrics of a step are read after the next step has been handed
to the device, so that the device never waits. A checkpoint holds everything that a step depends on (parameters,
optimiser, random key, carried memory, input position), so that a resumed run computes the same, bit for bit, as
one that never stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from brl_jax.sharding import MeshConfig, make_mesh
from train.engine.batch import HeldOut, Stream, num_tokens, stacked
from train.engine.checkpoint import Checkpoints
from train.engine.config import LoopConfig
from train.engine.config_file import write_json
from train.engine.errors import RunError, Stopped, UserError, one_line, reason
from train.engine.evaluation import Best, evaluate, held_out_metrics
from train.engine.hosts import ending_together, is_lead, preempted
from train.engine.mesh import TrainingPrograms, place_batch, training_programs
from train.engine.metrics import MetricsLog, Reporter, RunReport, log
from train.engine.optimizer import OptimizerConfig
from train.engine.profiling import Profiler
from train.engine.signals import Signals
from train.engine.step import Objective, TrainState, make_eval_step
from train.engine.storage import as_os_errors
from train.engine.throughput import Meter
from train.engine.watchdog import WATCHDOG


class Trained(NamedTuple):
    """A run that is done: its last state, what its last evaluation measured (`held_out_metrics`), and how fast this
    process trained (`train.engine.throughput.Meter`). The last two are empty if there was nothing left to do."""

    state: TrainState
    measured: dict[str, float]
    rates: dict[str, float]


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
    """Trains until `loop.steps`, from the newest intact checkpoint in the run's folder.

    Args:
      config: the whole configuration as JSON; saved in config.json and in each checkpoint.
      differences: takes a checkpoint's configuration and returns what differs from this one's and must not, in words.
      stream: the training batches; closed at the end.
      held_out, full_held_out: the data of the evaluations on the way, and of the last one (by default the same).
      mesh: what the arrays are sharded over; by default all devices in the default shape. The streams give the rows of
        this process (`train.engine.mesh.host_rows`).
      introduction: lines that are logged before the first step, once the run's folder can be written.
      report: shows the progress; by default a bar on a terminal, otherwise a line now and then.

    Raises:
      UserError: the run's checkpoint has another configuration or is of a later step than the last one, none is intact,
        or the folder cannot be written.
      RunError: the loss is no longer finite, or a checkpoint or the metrics can't be written; names the last good
        checkpoint.
      Stopped: a signal came; the run is saved.
    """
    mesh = make_mesh(MeshConfig()) if mesh is None else mesh
    with contextlib.closing(stream), jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        checkpoints = Checkpoints(
            epath.Path(loop.workdir) / "checkpoints", keep=loop.keep_checkpoints, log=log
        )
        programs = training_programs(mesh, objective, optimizer_config, loop)
        state, meta = _begin(loop, differences, programs.fresh, objective.start, checkpoints)
        if int(state.step) > loop.steps:  # config.json would say that it trained less than it has
            raise UserError(
                f"--steps must be at least {int(state.step)}, the step of the run in {loop.workdir}, got {loop.steps}"
            )
        unfinished = _go_to_checkpoint(meta, stream, held_out, loop.workdir)
        metrics_log = _open_folder(loop, config, int(state.step) - (unfinished is not None))
        for text in introduction:
            log(text)
        before = None if meta is None else meta["config"]["loop"]["steps"]
        for text in outlook(int(state.step), loop.steps, before, optimizer_config.warmup_steps):
            log(text)

        stack.enter_context(WATCHDOG.watching(loop.workdir))
        profiler = stack.enter_context(contextlib.closing(Profiler(loop.profile, loop.workdir)))
        stack.enter_context(contextlib.closing(checkpoints))
        stack.enter_context(contextlib.closing(metrics_log))
        signals = stack.enter_context(Signals())
        # Innermost, because a process that leaves the other contexts waits for the other processes.
        with report or Reporter(loop.steps, int(state.step)) as reporter, ending_together(loop.workdir):
            run = _Run(
                objective=objective,
                loop=loop,
                config=config,
                stream=stream,
                held_out=held_out,
                full_held_out=held_out if full_held_out is None else full_held_out,
                mesh=mesh,
                programs=programs,
                state=state,
                best=Best() if meta is None else Best(**meta["best"]),
                checkpoints=checkpoints,
                metrics_log=metrics_log,
                profiler=profiler,
                reporter=reporter,
                signals=signals,
            )
            if unfinished is not None:
                run.finish_step(evaluating=True, line=unfinished)
            while run.goes_on():
                run.take_steps()
                evaluating = run.step % loop.eval_every == 0 or run.step == loop.steps
                if evaluating or run.step % loop.checkpoint_every == 0 or signals.received:
                    run.finish_step(evaluating=evaluating)
        run.close()
    return Trained(run.state, run.measured, run.meter.summary())


@dataclasses.dataclass
class _Run:
    """A run while it trains: what it needs for a step, and what happens at one."""

    objective: Objective
    loop: LoopConfig
    config: Mapping[str, Any]
    stream: Stream
    held_out: HeldOut
    full_held_out: HeldOut
    mesh: Mesh
    programs: TrainingPrograms
    state: TrainState
    best: Best
    checkpoints: Checkpoints
    metrics_log: MetricsLog
    profiler: Profiler
    reporter: RunReport
    signals: Signals

    def __post_init__(self) -> None:
        self.step = int(self.state.step)
        self.measured: dict[str, float] = {}
        self.meter = Meter(self.objective, self.mesh.devices.flat[0].device_kind, self.mesh.devices.size)
        self._eval_step = jax.jit(make_eval_step(self.objective))
        self._late = _LateMetrics(self.meter)

    def goes_on(self) -> bool:
        """Whether there is another step."""
        patience = self.loop.patience
        if self.signals.received or self.step >= self.loop.steps:
            return False
        if patience and self.best.misses >= patience:
            log(f"step {self.step}: no better for {self.best.misses} evaluations; the run ends here")
            return False
        return True

    def take_steps(self) -> None:
        """Reads the batches of one call, hands its steps to the device, and reports the steps of the call before."""
        count = self._steps_of_call()
        with self.meter.input():
            batches = [next(self.stream) for _ in range(count)]
            batch = batches[0] if count == 1 else stacked(batches)
            placed = place_batch(self.mesh, batch, self.loop.batch)
        self.profiler.before(self.step + 1)
        program = self.programs.step if count == 1 else self.programs.steps
        self.state, metrics = program(self.state, placed)
        self.step += count
        self.profiler.after(self.step, metrics)
        WATCHDOG.alive()
        self.checkpoints.check()
        if preempted(self.step):
            self.signals.received = signal.SIGTERM
        arrays = batches[0].arrays
        self.meter.started(count, arrays)
        flops = self.meter.flops(self.state.params, arrays)
        for line in self._late.exchange(self.step, count, metrics, num_tokens(arrays), flops):
            self._check_finite(line, ("loss", "grad_norm"))
            self._report(line)

    def _steps_of_call(self) -> int:
        """The steps up to the next one at which the run may stop, at most `dispatch`; 1 while steps are traced."""
        loop = self.loop
        ends = (every - self.step % every for every in (loop.eval_every, loop.checkpoint_every))
        return 1 if loop.profile else min(loop.dispatch, loop.steps - self.step, *ends)

    def finish_step(self, *, evaluating: bool, line: dict[str, Any] | None = None) -> None:
        """Evaluates the step if asked to, reports it and saves a checkpoint. If a signal interrupts the evaluation, the
        checkpoint keeps the step's line, and the resumed run starts by finishing the step.

        Args:
          line: the metrics of a step that an earlier process took; by default of the last step.
        """
        if line is None:
            *before, line = self._late.read()
            for each in (*before, line):
                self._check_finite(each, ("loss", "grad_norm"))
            for each in before:
                self._report(each)
        score, interrupted = None, False
        if evaluating:
            self.reporter.busy("evaluating")
            measured, score = self._evaluate()
            interrupted = measured is None
            if measured is not None:
                self.measured = measured
                line |= measured
                self._check_finite(line, measured)
        if score is not None:
            self.best.add(score)
        if not interrupted:
            self._report(line)
        self.reporter.busy("saving")
        self._save(score, unfinished=line if interrupted else None)
        self._late.restart_clock()

    def close(self) -> None:
        """Waits until everything is written.

        Raises:
          RunError: something cannot be written. Stopped: a signal came.
        """
        self.checkpoints.wait()
        last_good = self.checkpoints.last_good
        if not self.metrics_log.sync():
            raise RunError(
                f"cannot write metrics.jsonl under {self.loop.workdir}; {last_good}; the same command on this machine "
                "writes it"
            )
        if self.signals.received:
            raise Stopped(
                f"stopped after step {self.step} of {self.loop.steps}; {last_good}; the same command resumes from "
                "there",
                self.signals.received,
            )

    def _evaluate(self) -> tuple[dict[str, float] | None, float | None]:
        """The measures on held-out data (None: a signal came), and the score that checkpoints are compared by: always
        on the same data, although the last evaluation of a run reports `full_held_out`."""
        sums = self._sums(self.held_out)
        if sums is None:
            return None, None
        measured = held_out_metrics(sums, self.held_out.num_bytes)
        score = measured.get(f"val_{self.objective.best}")
        if score is not None and self.objective.best != "loss":
            score = -score
        is_last = self.step == self.loop.steps or self.best.is_ended_by(score, self.loop.patience)
        if is_last and self.full_held_out is not self.held_out:
            sums = self._sums(self.full_held_out)
            if sums is None:
                return None, None
            measured = held_out_metrics(sums, self.full_held_out.num_bytes)
        return measured, score

    def _sums(self, data: HeldOut) -> dict[str, float] | None:
        def interrupted() -> bool:
            WATCHDOG.alive()
            return bool(self.signals.received)

        place = functools.partial(place_batch, self.mesh, rows=data.batch)
        return evaluate(self._eval_step, self.objective, self.state.params, data, interrupted, place)

    def _report(self, line: dict[str, Any]) -> None:
        try:
            self.metrics_log.write(line)
        except OSError as error:
            self.checkpoints.wait()
            raise RunError(
                f"cannot write metrics under {self.loop.workdir}: {one_line(error)}; {self.checkpoints.last_good}"
            ) from error
        self.reporter.step(line)

    def _save(self, score: float | None, *, unfinished: dict[str, Any] | None) -> None:
        meta = {
            "config": self.config,
            "position": self.stream.get_state(),
            "unfinished": unfinished,
            "best": dataclasses.asdict(self.best),
            "held_out": self.held_out.digest,
        }
        self.metrics_log.sync()  # the lines up to a checkpoint are there before it is
        self.checkpoints.save(self.step, self.state, meta, score=score)

    def _check_finite(self, line: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if not math.isfinite(line[name]):
                self.checkpoints.wait()
                raise RunError(f"step {line['step']}: {name} is {line[name]}; {self.checkpoints.last_good}")


class _LateMetrics:
    """The metrics of the last call's steps, which are read while the next call runs."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._waiting: tuple[int, int, Mapping[str, Any], int, float] | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Excludes the time since the last reading from the speed of the next step."""
        self._clock = time.perf_counter()

    def exchange(
        self, step: int, count: int, metrics: Mapping[str, Any], tokens: int, flops: float
    ) -> list[dict[str, Any]]:
        """Takes the metrics of `count` steps up to `step` that were just started, and the tokens and the operations of
        each. Returns the lines of the steps before, unless they were read already."""
        lines = [] if self._waiting is None else self.read()
        self._waiting = step, count, metrics, tokens, flops
        return lines

    def read(self) -> list[dict[str, Any]]:
        """Waits for the metrics that were taken last, and returns a line for each step."""
        assert self._waiting is not None
        (step, count, metrics, tokens, flops), self._waiting = self._waiting, None
        read = {name: np.asarray(value).reshape(count).tolist() for name, value in metrics.items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        speed = self._meter.call(count * tokens, count * flops, seconds)
        return [
            {
                "step": step - count + 1 + i,
                **{name: values[i] for name, values in read.items()},
                **speed,
            }
            for i in range(count)
        ]


def _begin(
    loop: LoopConfig,
    differences: Callable[[Mapping[str, Any]], Sequence[str]],
    fresh: Callable[[], TrainState],
    start: Callable[[Any], Any],
    checkpoints: Checkpoints,
) -> tuple[TrainState, dict[str, Any] | None]:
    """The state to start from, and the `meta` of its checkpoint (None for a new run)."""

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


def _go_to_checkpoint(
    meta: Mapping[str, Any] | None, stream: Stream, held_out: HeldOut, workdir: str
) -> dict[str, Any] | None:
    """Moves the input to the checkpoint's position. Returns the line of the checkpoint's step if a signal interrupted
    its evaluation."""
    if meta is None:
        return None
    stream.set_state(meta["position"])
    if None not in (meta["held_out"], held_out.digest) and meta["held_out"] != held_out.digest:
        raise UserError(
            f"--workdir: the run in {workdir} was started with other held-out data, so its scores cannot be "
            "compared; expected the same data, or another --workdir"
        )
    return meta["unfinished"]


def _open_folder(loop: LoopConfig, config: Mapping[str, Any], last_step: int) -> MetricsLog:
    """Writes config.json and opens the metrics."""
    try:
        if is_lead():
            with as_os_errors():
                write_json(config, epath.Path(loop.workdir) / "config.json")
        return MetricsLog(
            loop.workdir,
            last_step=last_step,
            tensorboard=loop.tensorboard,
            wandb_config=config if loop.log == "wandb" else None,
        )
    except OSError as error:
        raise UserError(f"--workdir: cannot write under {loop.workdir}: {reason(error)}") from error


def another_configuration(workdir: str, differing: Sequence[str]) -> UserError:
    """The error of a command whose folder has a run with another configuration."""
    return UserError(
        f"--workdir: the run in {workdir} is of another configuration: {', '.join(differing)}; "
        "expected the same, or another --workdir"
    )


def outlook(step: int, steps: int, before: int | None, warmup: int) -> list[str]:
    """The lines about a run that begins at `step` and ends at `steps`. `before` are the steps of its last command; None
    for a new run."""
    if step == steps:
        return [f"nothing is left to train: the run is at step {step}, and --steps is {steps}"]
    lines = []
    if before is not None:
        follows = (
            f"; --steps was {before}, and from here on the learning rate is that of a run of {steps} steps"
        )
        lines.append(f"resuming from step {step} of {steps}{'' if steps == before else follows}")
    if warmup > steps:
        lines.append(f"learning rate: rising to the end, as --warmup_steps is {warmup:,}, more than --steps")
    return lines
