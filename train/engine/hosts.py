"""Several processes as one run: how they find each other, what only one of them does, and what happens when one is
lost.

`jax.distributed` does the work. Every process runs the same program on the same numbers, so that all of them make the
same decisions; what only one of them sees (a signal) is agreed upon first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from brl_jax.fields import Checked, Count, Natural
from train.engine.config_file import differences
from train.engine.errors import UserError, one_line
from train.engine.storage import as_os_errors
from train.engine.watchdog import WATCHDOG

# A process that is silent for this long counts as lost. Gloo and the TPU's runtime mostly notice sooner.
_HEARTBEAT_SECONDS = 30
_MEETING_SECONDS = 300
# How long it may take until the others see a file that one process has written to a network file system.
_SHARING_SECONDS = 15
# Fields of the configuration that may differ between processes: the path of the shared folder, and the process itself.
_OWN = ("loop.workdir", "hosts")


@dataclasses.dataclass(frozen=True)
class HostsConfig(Checked):
    """The processes of a run. On one host, on TPU slices and under SLURM the defaults work."""

    coordinator: str | None = None
    """HOST:PORT at which the first process waits for the others; the same for all."""
    processes: Count | None = None
    """Number of processes."""
    process: Natural | None = None
    """Which of them this is, counted from 0."""

    def __post_init__(self):
        given = (self.coordinator, self.processes, self.process)
        if any(value is None for value in given) and any(value is not None for value in given):
            raise ValueError(
                "coordinator, processes and process must be given together, "
                f"got {self.coordinator}, {self.processes} and {self.process}"
            )
        if self.coordinator is None or self.processes is None or self.process is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"coordinator must be HOST:PORT, got {self.coordinator!r}")
        if self.process >= self.processes:
            raise ValueError(f"process must be at least 0 and below {self.processes}, got {self.process}")


def join(config: HostsConfig) -> None:
    """Connects to the other processes, before anything uses devices. With one process it does nothing."""
    if jax.distributed.is_initialized() or not (config.coordinator is not None or _in_a_cluster()):
        return
    try:
        jax.distributed.initialize(
            config.coordinator,
            config.processes,
            config.process,
            initialization_timeout=_MEETING_SECONDS,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and config.coordinator is None and "SLURM_PROCID" not in os.environ:
            return  # TPUs outside a cluster, where this is the only process
        raise UserError(f"--hosts: the processes did not meet: {one_line(error)}") from error
    if jax.process_count() > 1:
        WATCHDOG.start()


def check_shared(workdir: str, config: Mapping[str, Any]) -> None:
    """Makes sure that all processes have the same options and see the same folder, in which the first one writes a
    file; otherwise they would wait for each other for ever. With one process it does nothing.

    Raises:
      UserError: a process has other options or does not find the file; raised by all processes.
    """
    if jax.process_count() == 1:
        return
    own = json.loads(json.dumps(config))
    (token, first), *_ = gather([secrets.token_hex(8), own])
    folder = epath.Path(workdir)
    path, is_new = folder / f".shared-by-all-processes-{token}", False
    if is_lead():
        with contextlib.suppress(OSError), as_os_errors():  # then nobody finds it
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(token)
    differing, problem = differences(first, own, _OWN), ""
    if differing:
        problem = f"has other options than the first process: {', '.join(differing)}"
    elif not _appears(path):
        problem = f"does not find in {workdir} what the first process wrote there"
    problems = gather(problem)
    if is_lead():
        with contextlib.suppress(OSError), as_os_errors():  # it could not be written
            path.unlink(missing_ok=True)
        if is_new and any(problems):
            with contextlib.suppress(OSError), as_os_errors():  # it is not empty
                folder.rmdir()
    for process, words in enumerate(problems):
        if words:
            raise UserError(
                f"--workdir: process {process} of {len(problems)} {words}; expected one folder that all processes see, "
                "and the same options"
            )


def _appears(path: epath.Path) -> bool:
    """Whether a file can be seen, at least after a while."""
    given_up = time.monotonic() + _SHARING_SECONDS
    with contextlib.suppress(OSError), as_os_errors():
        while not (there := path.exists()) and time.monotonic() < given_up:
            time.sleep(0.1)
        return there
    return False


def _in_a_cluster() -> bool:
    """Whether the environment knows of other processes, or might, as on a TPU slice."""
    # A batch script has the number of its tasks too, but before it calls srun it is the only process.
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_NODELIST" in os.environ:
        return True
    if len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        return True
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def is_lead() -> bool:
    """Whether this process is the one that writes files and prints."""
    return jax.process_index() == 0


def gather(value: Any) -> list[Any]:
    """A JSON value from each process, in their order. All processes must call this together."""
    if jax.process_count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(content)))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = content
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes.tolist())]


@contextlib.contextmanager
def lead_first() -> Iterator[None]:
    """Lets the first process finish the body before the others start it, so that they find what it made.

    Raises:
      UserError: the first process did in the body; raised by all processes.
    """
    if is_lead():
        try:
            yield
        except UserError as error:
            gather(str(error))
            raise
        gather(None)
        return
    problem, *_ = gather(None)
    if problem is not None:
        raise UserError(problem)
    yield


def preempted(step: int) -> bool:
    """Whether all processes must stop after this step because one of them got SIGTERM; all return True at the same
    step.

    Every process calls this once a step. With a single process it returns False: that one handles its signals itself.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def ending_together(workdir: str) -> Iterator[None]:
    """Ends this process at once, with a line and exit status 1, when another one is lost.
    An orderly exit would wait for the lost process. If JAX notices the loss first, because the other process is
    silent, it ends this process with its own message.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"process {jax.process_index()} of {jax.process_count()} has lost another one, or cannot continue itself: "
            f"{one_line(error)}; started again, all resume from the last checkpoint in {workdir}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
