"""The parts that the configuration of every run has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Self

from brl_jax.fields import Checked, NonNegative
from brl_jax.models import StackConfig
from brl_jax.sharding import MeshConfig
from train.engine.config import LoopConfig
from train.engine.fields import Flat, Free
from train.engine.hosts import HostsConfig
from train.engine.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RunConfig(Checked):
    """The parts that every task's configuration has; `data` and `model` are the task's own classes."""

    loop: Annotated[LoopConfig, Flat]
    data: Annotated[Any, Flat]
    model: Annotated[StackConfig, Flat]
    optimizer: Annotated[OptimizerConfig, Flat]
    mesh: Free[MeshConfig] = MeshConfig()
    """The devices."""
    hosts: Free[HostsConfig] = HostsConfig()
    """The processes."""
    z_loss: NonNegative = 0.0
    """Adds this much times the squared logarithm of the softmax's denominator to each target's loss in training (PaLM
    uses 1e-4); evaluations leave it out."""

    def changed(self, **parts: Mapping[str, Any]) -> Self:
        """With some fields of its parts changed: `config.changed(loop={"steps": 9})`."""
        found = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in parts.items()}
        return dataclasses.replace(self, **found)

    def resolved(self) -> Self:
        """The configuration with the fields that a file sets, such as a pretrained run's. Raises UserError if the file
        cannot be read."""
        return self

    def without_effect(self) -> dict[str, str]:
        rotates = self.model.rotary_base is not None or self.model.rope_theta is None
        return {} if rotates else {"model.rope_theta": "in a network without rotary positions"}
