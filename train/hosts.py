"""Several processes as one run: how they find each other, what only one of them does, what happens when one is lost.

`jax.distributed` does the work. Every process runs the same program on the same numbers, so that all of them come to
the same decisions; what only one may see (a signal) is agreed upon first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import os
import sys
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from brl_jax.attention.core.checks import check_at_least
from train.errors import UserError, one_line

# A process that is silent for so long is taken for dead. Gloo and the TPU's runtime mostly notice sooner.
_HEARTBEAT_SECONDS = 30
_MEETING_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class HostsConfig:
    """The processes of a run. Nothing need be said on one host, on TPU slices and under SLURM."""

    coordinator: str | None = None
    """HOST:PORT where the first process waits for the others; the same for all."""
    processes: int | None = None
    """How many processes there are."""
    process: int | None = None
    """Which of them this is, from 0 on."""

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
        check_at_least(self, "processes")
        if not 0 <= self.process < self.processes:
            raise ValueError(f"process must be at least 0 and below {self.processes}, got {self.process}")


def join(config: HostsConfig) -> None:
    """Meets the other processes, before anything asks for devices; does nothing where there is one process.

    Raises:
      UserError: they did not meet in five minutes.
    """
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
            return  # TPUs that are no slice of a cluster: nobody to meet
        raise UserError(f"--hosts: the processes did not meet: {one_line(error)}") from error


def _in_a_cluster() -> bool:
    """Whether the environment says that there are other processes, or may know: on a TPU slice it does."""
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        return True
    if len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1:
        return True
    chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and importlib.util.find_spec("libtpu") is not None


def is_lead() -> bool:
    """Whether this process is the one that writes and talks."""
    return jax.process_index() == 0


@contextlib.contextmanager
def lead_first(name: str) -> Iterator[None]:
    """A context that the first process has left when the others enter it: what it makes, they find."""
    many = jax.process_count() > 1
    if many and not is_lead():
        multihost_utils.sync_global_devices(name)
    yield
    if many and is_lead():
        multihost_utils.sync_global_devices(name)


def preempted(step: int) -> bool:
    """Whether all processes are to stop after this step, because one of them got SIGTERM; all hear it at the same step.

    Asked by every process once a step; False where there is one process, which hears signals by itself.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def ending_together(workdir: str) -> Iterator[None]:
    """A context in which the loss of another process ends this one at once, with a line and exit status 1.

    To leave in order would mean to wait for the lost one. Where JAX itself hears of the loss first, by the other's
    silence, it ends the process with a message of its own.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        print(
            f"process {jax.process_index()} of {jax.process_count()} has lost another one, or cannot go on itself: "
            f"{one_line(error)}; started again, all go on from the last checkpoint in {workdir}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
