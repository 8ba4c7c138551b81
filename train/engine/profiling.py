"""A trace of some steps, for TensorBoard or XProf: --profile 10:20."""

from __future__ import annotations

import os
import re
from typing import Any

import jax

from train.engine.metrics import log
from train.engine.storage import is_remote, user_cache


def parse_steps(spec: str) -> range:
    """The steps of "10:20", both included; empty for "". Raises ValueError for anything else."""
    if not spec:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", spec)
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not steps or steps.start < 1:
        raise ValueError(f"profile must be FIRST:LAST, two steps in ascending order, got {spec!r}")
    return steps


class Profiler:
    """Traces the steps that `spec` names, on every process, in workdir/profile. The profiler writes to local folders
    only, so a run in object storage uses the user's cache."""

    def __init__(self, spec: str, workdir: str):
        self._steps = parse_steps(spec)
        self._folder = os.path.join(user_cache() if is_remote(workdir) else workdir, "profile")
        self._running = self._begun = False

    def before(self, step: int) -> None:
        """Called before a step begins."""
        if step in self._steps and not self._running:
            jax.profiler.start_trace(self._folder)
            self._running = self._begun = True

    def after(self, step: int, metrics: Any) -> None:
        """Called when a step was handed to the device."""
        if self._running and step >= self._steps[-1]:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        """Ends a trace that is running, and says so if none has begun."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            log(
                f"profile of steps {self._steps[0]} to {self._steps[-1]}: tensorboard --logdir {self._folder}"
            )
        elif self._steps and not self._begun:
            log(f"no profile: none of the steps {self._steps[0]} to {self._steps[-1]} was trained")
