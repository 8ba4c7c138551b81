"""The checkpoints of a run, written in the background. The newest few and the best one are kept.

`brl_jax.checkpoints` defines the format, and reads it. The items are `params`, `rest` (optimiser, step, random key,
carried memory, moments of the gradients) and `meta` (configuration, input position, held-out score).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from brl_jax.checkpoints import (
    absolute,
    candidates,
    read_arrays,
    read_meta,
    scores_in,
    silence_abandoned_tasks,
    steps_in,
)
from brl_jax.sharding import parameter_shardings
from train.engine.errors import RunError, UserError, is_memory_shortage, one_line, reason
from train.engine.hosts import gather, is_lead
from train.engine.step import TrainState
from train.engine.storage import as_os_errors, is_remote, move, write_whole

T = TypeVar("T")

_DAMAGED = "damaged_checkpoints"
_REMOVAL_SECONDS = 5.0
# Words with which object storage and TensorStore say that they cannot answer.
_REFUSALS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")


class Restored(NamedTuple):
    """A checkpoint that was read: the step, the state, and the `meta` that `save` was given."""

    step: int
    state: TrainState
    meta: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder.

    Args:
      folder: created when the first checkpoint is written.
      keep: how many of the newest to keep, in addition to the one with the lowest score.
      log: called with a line about each checkpoint that is skipped.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 1, log: Callable[[str], None] = print):
        self.folder = epath.Path(folder)
        self._keep = keep
        self._log = log
        self._manager: ocp.CheckpointManager | None = None
        self._good: int | None = None
        self._writing: int | None = None
        self._scores: dict[int, float] = {}

    def save(
        self, step: int, state: TrainState, meta: Mapping[str, Any], *, score: float | None = None
    ) -> None:
        """Starts to write a checkpoint; returns once the state may be changed or donated.

        A checkpoint of the same step must have the same arrays, and only its `meta` is replaced: an interrupted
        evaluation has been finished. The arrays stay on the disk throughout.

        Args:
          meta: what to keep with the arrays, as JSON.
          score: the score on held-out data at this step, the lower the better; None if it was not measured.

        Raises:
          RunError: this checkpoint or the one before cannot be written; names the last good one.
        """
        items = _split(state)
        meta = {**meta, "score": score}
        try:
            manager = self._open_for_writing()
            manager.wait_until_finished()
            self._good, self._writing = self._writing or self._good, step
            if score is not None:
                self._scores[step] = score
            if step in manager.all_steps():
                if is_lead():
                    with as_os_errors():
                        write_whole(self.folder / str(step) / "meta" / "metadata", json.dumps(meta))
                return
            manager.save(
                step,
                args=ocp.args.Composite(
                    meta=ocp.args.JsonSave(meta),
                    **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
                ),
            )
        except Exception as error:  # whatever the storage raises, the run cannot continue
            raise self._failure(error) from error

    def check(self) -> None:
        """Raises RunError as `save` does, without waiting, if the checkpoint that was being written has failed."""
        if self._writing is not None and not self._open_for_writing().is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Returns once everything is written. Raises RunError as `save` does."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        self._good, self._writing = self._writing or self._good, None

    def close(self) -> None:
        """Frees the threads, after finishing the checkpoints that are being written; `wait` raises their errors."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            with contextlib.suppress(Exception):  # a failed write, whose error is on its way already
                manager.close()

    @property
    def last_good(self) -> str:
        """The newest checkpoint that is known to be intact, in words."""
        good = "none" if self._good is None else str(self.folder / str(self._good))
        return f"last good checkpoint: {good}"

    def _failure(self, error: Exception) -> RunError:
        self.close()
        self._free_disk()
        return RunError(f"cannot write a checkpoint under {self.folder}: {one_line(error)}; {self.last_good}")

    def _free_disk(self) -> None:
        """Removes what a failed write left on a local disk. Tasks that it abandoned may still be adding files."""
        if is_remote(self.folder) or not is_lead():
            return
        given_up = time.monotonic() + _REMOVAL_SECONDS
        while (names := self._half_written()) and time.monotonic() < given_up:
            for name in names:
                with contextlib.suppress(OSError):
                    (self.folder / name).rmtree()
            time.sleep(0.1)

    def _open_for_writing(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # A write that fails is reported in one line (`_failure`); Orbax and its tasks would add hundreds.
            for logger in ("absl", "asyncio"):
                logging.getLogger(logger).setLevel(logging.CRITICAL)
            silence_abandoned_tasks()
            self._scores = scores_in(self.folder)
            self._manager = ocp.CheckpointManager(
                absolute(self.folder),
                options=ocp.CheckpointManagerOptions(preservation_policy=self, cleanup_tmp_directories=True),
            )
        return self._manager

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which checkpoints (ascending, with their `step`) to keep; the manager calls this after each one it has
        written."""
        best = min(self._scores, key=lambda step: self._scores[step], default=None)
        last = {checkpoint.step for checkpoint in checkpoints[-self._keep :]}
        return [checkpoint.step in last or checkpoint.step == best for checkpoint in checkpoints]

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the folder, ascending, including damaged ones."""
        try:
            with as_os_errors():
                return steps_in(self.folder)
        except OSError as error:
            raise UserError(f"--workdir: cannot read {self.folder}: {reason(error)}") from error

    def restore(self, like: TrainState, check: Callable[[dict[str, Any]], None]) -> Restored | None:
        """The newest intact checkpoint, or None in a new folder.

        Damaged and half-written ones are skipped, with a line each, and moved out of the way once an older one proves
        to be intact.

        Args:
          like: a state of the same shapes; the restored one gets its shardings.
          check: called with `meta` before the arrays are read; may raise to refuse the checkpoint.

        Raises:
          UserError: there are checkpoints and none of them is intact.
          RunError: there is too little memory to read one, or the storage doesn't answer, which says nothing about the
            checkpoint; nothing is moved.
        """
        abstract = {name: _abstract(tree) for name, tree in _split(like).items()}
        skipped: list[int] = []
        steps, *_ = gather(self.steps())  # a network file system may list them late elsewhere
        for name in self._half_written():
            self._log(f"checkpoint {self.folder / name} is half-written and not used")
        for step in reversed(steps):
            meta = self._on_all(step, skipped, functools.partial(read_meta, self.folder, step))
            if meta is None:
                continue
            check(meta)
            items = self._on_all(step, skipped, functools.partial(read_arrays, self.folder, step, abstract))
            if items is None:
                continue
            for damaged in skipped:
                self._set_aside(damaged)
            self._good = step
            return Restored(step, TrainState(params=items["params"], **items["rest"]), meta)
        if skipped:
            raise UserError(
                f"--workdir: no intact checkpoint in {self.folder}; expected one, or an empty folder"
            )
        return None

    def _on_all(self, step: int, skipped: list[int], read: Callable[[], T]) -> T | None:
        """What `read` returns. If it fails on any process, all of them skip the checkpoint, and get None."""
        value, problem = self._try(step, read)
        problems = [found for found in gather(problem) if found is not None]
        if problems:
            unreachable, words = max(problems)
            self._skip(step, unreachable, words, skipped)
            return None
        return value

    def _try(self, step: int, read: Callable[[], T]) -> tuple[T | None, list[Any] | None]:
        """What `read` returns, or why it cannot: whether the storage doesn't answer, and the reason."""
        try:
            with as_os_errors():
                return read(), None
        except Exception as error:  # whatever the storage raises
            self._check_memory(step, error)
            return None, [_is_unreachable(error), one_line(error)]

    def meta(self, step: int) -> dict[str, Any] | None:
        """The `meta` of one checkpoint, or None if it is damaged."""
        return self._try(step, lambda: read_meta(self.folder, step))[0]

    def read_params(
        self,
        init: Callable[[jax.Array], Any],
        which: str,
        *,
        option: str = "--workdir",
        explain: Callable[[int], None] = lambda step: None,
        mesh: Mesh | None = None,
    ) -> tuple[int, Any]:
        """The step of a checkpoint and its parameters, on this process's first device or divided over a mesh.

        Args:
          init: makes parameters of the same shapes from a random key.
          which: best, last or a step, see `brl_jax.checkpoints.candidates`.
          option: the command line's name of the run's folder, for the error.
          explain: called with the step of each checkpoint that cannot be read; may raise a better error.
          mesh: divides the parameters as in training.

        Raises:
          UserError: there is no such checkpoint, or it is damaged ("last" then takes the one before it).
          RunError: there is too little memory to read it.
        """
        steps = self.choose(which, option=option)
        boxed = jax.eval_shape(init, jax.random.key(0))
        shapes = nn.unbox(boxed)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda _: here, shapes) if mesh is None else parameter_shardings(mesh, boxed)
        like = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
        )
        for step in steps:
            try:
                return step, read_arrays(self.folder, step, {"params": like})["params"]
            except Exception as error:  # whatever the storage raises
                self._check_memory(step, error)
                explain(step)
                message = f"checkpoint {self.folder / str(step)} is damaged ({one_line(error)})"
                if step == steps[-1]:
                    others = ", ".join(str(each) for each in self.steps() if each not in steps)
                    raise UserError(f"{message}; there are also {others}" if others else message) from error
                self._log(f"{message}; trying the one before it")
        raise AssertionError("unreachable: there is at least one checkpoint")

    def choose(self, which: str, *, option: str = "--workdir") -> list[int]:
        """`brl_jax.checkpoints.candidates`. Raises UserError if there is no such checkpoint."""
        self.steps()
        try:
            return candidates(self.folder, which)
        except LookupError as error:
            raise UserError(f"{'--checkpoint' if self.steps() else option}: {error}") from error

    def _half_written(self) -> list[str]:
        """Names of what a crash while writing left in the folder."""
        if not self.folder.exists():
            return []
        return sorted(path.name for path in self.folder.iterdir() if "checkpoint-tmp" in path.name)

    def _check_memory(self, step: int, error: Exception) -> None:
        if is_memory_shortage(error):
            where = self.folder / str(step)
            raise RunError(f"out of memory while reading checkpoint {where}: {one_line(error)}") from error

    def _skip(self, step: int, unreachable: bool, words: str, skipped: list[int]) -> None:
        path = self.folder / str(step)
        if unreachable:
            raise RunError(
                f"cannot read checkpoint {path}: {words}; nothing was changed, start again when it can be"
            )
        skipped.append(step)
        self._log(f"checkpoint {path} is damaged or half-written ({words}); trying the one before it")

    def _set_aside(self, step: int) -> None:
        if not is_lead():
            return
        folder = self.folder.parent / _DAMAGED
        folder.mkdir(parents=True, exist_ok=True)
        names = itertools.chain([str(step)], (f"{step}.{number}" for number in itertools.count(1)))
        target = next(path for path in map(folder.joinpath, names) if not path.exists())
        move(self.folder / str(step), target)


def _split(state: TrainState) -> dict[str, Any]:
    """The items of a state's arrays, each a pytree of plain containers."""
    rest = {"step": state.step, "opt_state": state.opt_state, "key": state.key, "memory": state.memory}
    if state.moments is not None:
        rest["moments"] = state.moments
    return {"params": state.params, "rest": rest}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether an error says that storage refuses or does not answer, and nothing about what is stored."""
    while error is not None:
        if isinstance(error, (PermissionError, ConnectionError, TimeoutError)):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ESTALE, errno.ETIMEDOUT):
            return True
        if any(word in str(error) for word in _REFUSALS):
            return True
        error = error.__cause__
    return False
