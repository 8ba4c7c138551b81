"""The configuration of a run of in-context regression, and named ones."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from brl_jax.layers import BilinearBTTConfig, BilinearMLRConfig, FullConfig, Mechanism
from brl_jax.models import RegressorConfig
from brl_jax.sharding import MeshConfig
from train.config import Flat, LoopConfig
from train.data.in_context import InContextConfig
from train.hosts import HostsConfig
from train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class RegressionModelConfig(RegressorConfig):
    """The network."""

    # The task decides: not options of the command line.
    is_causal: Annotated[bool, tyro.conf.Fixed, tyro.conf.Suppress] = True
    num_inputs: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1
    num_outputs: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1
    max_length: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1024


@dataclasses.dataclass(frozen=True)
class RegressionConfig:
    """A decoder trained to predict linear functions from examples in its context."""

    loop: Annotated[LoopConfig, Flat]
    data: Annotated[InContextConfig, Flat]
    model: Annotated[RegressionModelConfig, Flat]
    optimizer: Annotated[OptimizerConfig, Flat]
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    hosts: HostsConfig = HostsConfig()
    """The processes."""


def _small(mechanism: Mechanism, num_heads: int) -> RegressionConfig:
    return RegressionConfig(
        loop=LoopConfig(steps=6_000, batch=64, eval_every=500, checkpoint_every=500, keep_checkpoints=1),
        data=InContextConfig(),
        model=RegressionModelConfig(
            num_layers=3, d_model=64, num_heads=num_heads, ffn="relu", mechanism=mechanism, mup_base_width=64
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200, weight_decay=0.0, beta2=0.98),
    )


PRESETS: dict[str, RegressionConfig] = {
    "full-8": _small(FullConfig(), 8),
    "full-1": _small(FullConfig(), 1),
    "btt-8": _small(BilinearBTTConfig(), 8),
    "mlr-8": _small(BilinearMLRConfig(), 8),
}
