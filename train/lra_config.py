"""The configuration of a Long Range Arena run."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from brl_jax.models import EncoderConfig
from brl_jax.sharding import MeshConfig
from train.config import Flat, LoopConfig
from train.data.lra import LraDataConfig
from train.hosts import HostsConfig
from train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class LraModelConfig(EncoderConfig):
    """The network."""

    # The task and the data decide: not options of the command line.
    vocab_size: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 256
    num_classes: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 2
    max_length: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1024


@dataclasses.dataclass(frozen=True)
class TaskDataConfig(LraDataConfig):
    """The examples."""

    # The preset's: its other settings are for this task.
    task: Annotated[str, tyro.conf.Fixed, tyro.conf.Suppress] = "listops"


@dataclasses.dataclass(frozen=True)
class LraConfig:
    """An encoder trained to classify the sequences of one task."""

    loop: Annotated[LoopConfig, Flat]
    data: Annotated[TaskDataConfig, Flat]
    model: Annotated[LraModelConfig, Flat]
    optimizer: Annotated[OptimizerConfig, Flat]
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    hosts: HostsConfig = HostsConfig()
    """The processes."""
