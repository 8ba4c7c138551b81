"""Where else the metrics of a run go: TensorBoard events (`--tensorboard`), Weights & Biases (`--log wandb`)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.engine.errors import UserError

_SECONDS_BETWEEN_FLUSHES = 30.0


class TensorboardLog:
    """An event file of a run.

    tensorboardX's `SummaryWriter` leaves events to a thread. If a full disk ends that thread, its queue fills up and
    the caller waits for ever. `EventsWriter`, used here, writes at once.
    """

    def __init__(self, folder: Path, last_step: int):
        # The package takes a while to load; commands that write no events don't load it.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._events = EventsWriter(str(folder / "events"))
        # TensorBoard hides the events of earlier files from this step on.
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=last_step + 1, wall_time=time.time(), session_log=start))
        self._flushed = time.monotonic()

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds the metrics of a step: `line` has "step", and numbers otherwise. Raises OSError."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in line.items() if name != "step"
        ]
        event = Event(step=line["step"], wall_time=time.time(), summary=Summary(value=values))
        self._events.write_event(event)
        if time.monotonic() - self._flushed > _SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        """Writes all events to the disk. Raises OSError."""
        self._events.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the file. If the disk is full, events are lost; metrics.jsonl has their numbers."""
        with contextlib.suppress(OSError):
            self._events.close()


class WandbLog:
    """One run of the project "brl-jax" (or WANDB_PROJECT); a run that is resumed goes on there."""

    def __init__(self, workdir: str, folder: Path, config: Mapping[str, Any]):
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise UserError("--log wandb: needs wandb: pip install -e '.[wandb]'") from error
        identity = hashlib.sha256(os.path.abspath(workdir).encode()).hexdigest()[:16]
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "brl-jax"),
                name=Path(workdir).name,
                id=identity,
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(silent=True),
            )
        except wandb.errors.Error as error:
            raise UserError(f"--log wandb: {error}; WANDB_MODE=offline needs no account") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds the metrics of a step."""
        self._run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def flush(self) -> None:
        """The client sends metrics by itself."""

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()
