"""Metrics in Weights & Biases: --log wandb. WANDB_MODE=offline keeps them in the run's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.engine.errors import UserError


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

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()
