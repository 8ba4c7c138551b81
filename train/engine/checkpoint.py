"""Checkpoints of a run: written in the background, checked when read; the newest few and the best one are kept.

A checkpoint is folder/STEP with three items: `params`, `rest` (everything else that a step changes: optimiser, step,
random key, carried memory, moments of the gradients) and `meta` (configuration, input position, held-out score,
digests). Damage that the storage format does not detect is found by digests of the arrays' bits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from train.engine.errors import RunError, UserError, is_memory_shortage, one_line
from train.engine.hosts import gather, is_lead
from train.engine.step import TrainState
from train.engine.storage import absolute, as_os_errors, move, write_whole

_DAMAGED = "damaged_checkpoints"


# Of what object storage and TensorStore report in words.
_REFUSALS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")


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


class Restored(NamedTuple):
    """A checkpoint that was read: the step, the state, and the `meta` that `save` was given."""

    step: int
    state: TrainState
    meta: dict[str, Any]


@jax.jit
def _bit_sums(leaves: list[jax.Array]) -> jax.Array:
    """For each array, the sum of its elements' bits as unsigned integers, modulo 2^32: exact in any order."""

    def bit_sum(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.bool_:
            bits = x
        else:
            width = min(x.dtype.itemsize, 4)
            bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
        return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)

    return jnp.stack([bit_sum(x) for x in leaves])


def digest(tree: Any) -> str:
    """A hash of the bits of every array in a pytree, computed on the devices that hold the arrays."""
    leaves = jax.tree.leaves(tree)
    return hashlib.sha256(np.asarray(_bit_sums(leaves)).tobytes() if leaves else b"").hexdigest()[:16]


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _split(state: TrainState) -> dict[str, Any]:
    """The items of a state's arrays, each a pytree of plain containers."""
    rest = {"step": state.step, "opt_state": state.opt_state, "key": state.key, "memory": state.memory}
    if state.moments is not None:
        rest["moments"] = state.moments
    return {"params": state.params, "rest": rest}


def _silence_abandoned_reads() -> None:
    """Keeps reads that Orbax abandons from printing tracebacks on stderr when they end.

    Where one array of a checkpoint is damaged, Orbax closes its event loop while TensorStore's threads still read the
    other arrays; each of these then finds the loop closed, at any moment until long after the error was raised. The
    hook must therefore be in place before a read begins, and stay.
    """
    before = sys.unraisablehook
    if getattr(before, "silences_abandoned_reads", False):
        return

    def hook(unraisable: Any) -> None:
        abandoned = inspect.iscoroutine(unraisable.object) or "loop is closed" in str(unraisable.exc_value)
        if not abandoned:
            before(unraisable)

    hook.silences_abandoned_reads = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


class Checkpoints:
    """The checkpoints in one folder.

    Args:
      folder: created when the first checkpoint is written.
      keep: how many of the newest to keep, besides the one with the lowest score.
      log: called with a line about each checkpoint that is skipped.

    Raises:
      UserError: the folder cannot be read.
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

        Where there is a checkpoint of the same step, which must have the same arrays, its `meta` alone is replaced: an
        evaluation that was interrupted has been finished. The arrays are on the disk at every moment.

        Args:
          meta: what to keep beside the arrays, as JSON.
          score: the score on held-out data at this step, the lower the better; None where it was not measured.

        Raises:
          RunError: this checkpoint or the one before cannot be written, or the folder has another one of this step;
            names the last good one.
        """
        items = _split(state)
        meta = {**meta, "score": score, "digests": {name: digest(tree) for name, tree in items.items()}}
        try:
            manager = self._open_for_writing()
            manager.wait_until_finished()
            self._good, self._writing = self._writing or self._good, step
            if score is not None:
                self._scores[step] = score
            if step in manager.all_steps():
                self._replace_meta(step, meta)
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

    def _replace_meta(self, step: int, meta: Mapping[str, Any]) -> None:
        """Writes the `meta` of a checkpoint anew, as Orbax's handler of JSON does, but under another name first."""
        if self._read(step, meta=ocp.args.JsonRestore())["meta"]["digests"] != meta["digests"]:
            raise OSError(f"{self.folder / str(step)} exists, with other arrays")
        if is_lead():
            with as_os_errors():
                write_whole(self.folder / str(step) / "meta" / "metadata", json.dumps(meta))

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
            with contextlib.suppress(Exception):  # a write that failed, whose error is on its way already
                manager.close()

    @property
    def last_good(self) -> str:
        """The newest checkpoint that is known to be whole, in words."""
        good = "none" if self._good is None else str(self.folder / str(self._good))
        return f"last good checkpoint: {good}"

    def _failure(self, error: Exception) -> RunError:
        return RunError(f"cannot write a checkpoint under {self.folder}: {one_line(error)}; {self.last_good}")

    def _open_for_writing(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # A write that fails is reported in one line (`_failure`); Orbax and its tasks would add hundreds.
            for logger in ("absl", "asyncio"):
                logging.getLogger(logger).setLevel(logging.CRITICAL)
            _silence_abandoned_reads()
            self._scores = self._read_scores()
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
                if not self.folder.exists():
                    return []
                return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())
        except OSError as error:
            raise UserError(f"--workdir: cannot read {self.folder}: {one_line(error)}") from error

    def _half_written(self) -> list[str]:
        """Names of what a crash while writing left in the folder."""
        if not self.folder.exists():
            return []
        return sorted(path.name for path in self.folder.iterdir() if "checkpoint-tmp" in path.name)

    def _read_scores(self) -> dict[int, float]:
        """The scores measured at the checkpoints, by step."""
        scores = {}
        for step in self.steps():
            with contextlib.suppress(OSError, KeyError):  # damaged: it has no score
                scores[step] = self._read(step, meta=ocp.args.JsonRestore())["meta"]["score"]
        return {step: score for step, score in scores.items() if score is not None}

    def best_step(self) -> int | None:
        """The step of the checkpoint with the lowest score, or None where none was measured."""
        scores = self._read_scores()
        return min(scores, key=lambda step: scores[step], default=None)

    def restore(self, like: TrainState, check: Callable[[dict[str, Any]], None]) -> Restored | None:
        """The newest whole checkpoint, or None where there is no checkpoint at all.

        Damaged and half-written ones are skipped, with a line each, and moved out of the way once an older one proves
        to be whole.

        Args:
          like: a state of the same shapes; the restored one gets its shardings.
          check: called with `meta` before the arrays are read; may raise to refuse the checkpoint.

        Raises:
          UserError: there are checkpoints and none of them is whole.
          RunError: the memory does not suffice to read one, or the storage refuses or does not answer, which says
            nothing about the checkpoint; nothing is moved.
        """
        abstract = {name: _abstract(tree) for name, tree in _split(like).items()}
        skipped: list[int] = []
        for name in self._half_written():
            self._log(f"checkpoint {self.folder / name} is half-written and not used")
        for step in reversed(self.steps()):
            failed: Exception | None = None
            try:
                meta = self._read(step, meta=ocp.args.JsonRestore())["meta"]
            except RunError:
                raise
            except Exception as error:
                failed = error
            # Together, because the processes read the arrays together.
            found = gather(None if failed is None else [_is_unreachable(failed), one_line(failed)])
            problems = [problem for problem in found if problem is not None]
            if problems:
                unreachable, words = max(problems)
                self._skip(step, unreachable, words, skipped)
                continue
            check(meta)
            try:
                items = self._read_checked(step, meta, abstract)
            except RunError:
                raise
            except Exception as error:
                if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                    raise  # another process is gone; the checkpoint may be whole
                self._skip(step, _is_unreachable(error), one_line(error), skipped)
                continue
            for damaged in skipped:
                self._set_aside(damaged)
            self._good = step
            return Restored(step, TrainState(params=items["params"], **items["rest"]), meta)
        if skipped:
            raise UserError(
                f"--workdir: no whole checkpoint in {self.folder}; expected one, or an empty folder"
            )
        return None

    def meta(self, step: int) -> dict[str, Any] | None:
        """The `meta` of one checkpoint, or None where it is damaged."""
        try:
            return self._read(step, meta=ocp.args.JsonRestore())["meta"]
        except (OSError, KeyError):
            return None

    def restore_params(self, like: Any, step: int) -> Any:
        """The parameters of one checkpoint.

        Args:
          like: parameters of the same shapes, or their ShapeDtypeStructs with shardings.

        Raises:
          UserError: the checkpoint is damaged, or its arrays have other shapes.
          RunError: the memory does not suffice to read it.
        """
        try:
            meta = self._read(step, meta=ocp.args.JsonRestore())["meta"]
            return self._read_checked(step, meta, {"params": _abstract(like)})["params"]
        except RunError:
            raise
        except Exception as error:
            raise UserError(f"checkpoint {self.folder / str(step)} is damaged ({one_line(error)})") from error

    def choose(self, which: str, *, option: str = "--workdir") -> list[int]:
        """The steps of the checkpoints to read, the first one unless it is damaged.

        Args:
          which: "best" (the last where none was measured), "last" (those before it come next) or a step.
          option: the command line's name of the run's folder, for the error.

        Raises:
          UserError: there is no such checkpoint.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"{option}: no checkpoint in {self.folder}; expected one that training wrote")
        match which:
            case "best":
                best = self.best_step()
                return steps[::-1] if best is None else [best]
            case "last":
                return steps[::-1]
            case _ if which.isdecimal() and int(which) in steps:
                return [int(which)]
        raise UserError(
            f"--checkpoint: expected best, last or one of {', '.join(map(str, steps))}, got {which}"
        )

    def read_params(
        self,
        init: Callable[[jax.Array], Any],
        which: str,
        *,
        option: str = "--workdir",
        explain: Callable[[int], None] = lambda step: None,
    ) -> tuple[int, Any]:
        """The step and the parameters, on this process's first device, of the checkpoint that `choose` finds.

        Args:
          init: makes parameters of the same shapes from a random key.
          which, option: as for `choose`.
          explain: called with the step of each checkpoint that cannot be read; may raise a better error.

        Raises:
          UserError: there is no such checkpoint, or it is damaged ("last" then takes the one before it).
        """
        steps = self.choose(which, option=option)
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            nn.unbox(jax.eval_shape(init, jax.random.key(0))),
        )
        for step in steps:
            try:
                return step, self.restore_params(like, step)
            except UserError as error:
                explain(step)
                if step == steps[-1]:
                    raise
                self._log(f"{error}; trying the one before it")
        raise AssertionError("unreachable: there is at least one checkpoint")

    def _read(self, step: int, **args: Any) -> Mapping[str, Any]:
        """Items of one checkpoint. Raises OSError where one is missing or damaged, and JaxRuntimeError where another
        process is gone, and RunError where the memory does not suffice."""
        _silence_abandoned_reads()
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(
                    absolute(self.folder) / str(step), args=ocp.args.Composite(**args)
                )
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                raise
            reason, shortage = one_line(error), is_memory_shortage(error)
        if shortage:
            raise RunError(f"out of memory while reading checkpoint {self.folder / str(step)}: {reason}")
        raise OSError(reason)

    def _read_checked(
        self, step: int, meta: Mapping[str, Any], abstract: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        args = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        items = self._read(step, **args)
        for name in abstract:
            if digest(items[name]) != meta["digests"][name]:
                raise OSError(f"the bits of {name} are not those that were saved")
        return items

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
