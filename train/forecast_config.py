"""The configurations of a forecasting run: an encoder that forecasts the whole horizon at once, or a decoder of
tokens."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal, get_args

import tyro
from etils import epath

from brl_jax.attention.core.checks import check_choice
from brl_jax.layers import FullConfig
from brl_jax.models import DecoderConfig, RegressorConfig
from brl_jax.sharding import MeshConfig
from train.config import Flat, LoopConfig, read_json
from train.data.series import SeriesConfig
from train.data.series_tokens import TokenSeriesConfig
from train.hosts import HostsConfig
from train.optimizer import OptimizerConfig

LossKind = Literal["squared", "absolute"]
Center = Literal["last", "mean", "none"]


@dataclasses.dataclass(frozen=True)
class ForecastModelConfig(RegressorConfig):
    """The network."""

    is_causal: Annotated[bool, tyro.conf.Fixed, tyro.conf.Suppress] = False
    # The data decide: not options of the command line.
    num_inputs: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1
    num_outputs: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1
    max_length: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 1024


@dataclasses.dataclass(frozen=True)
class TokenModelConfig(DecoderConfig):
    """The network."""

    # The bins decide: not an option of the command line.
    vocab_size: Annotated[int, tyro.conf.Fixed, tyro.conf.Suppress] = 512


@dataclasses.dataclass(frozen=True)
class ForecastConfig:
    """An encoder that reads what is known, and empty tokens for the horizon, and fills those in."""

    loop: Annotated[LoopConfig, Flat]
    data: Annotated[SeriesConfig, Flat]
    model: Annotated[ForecastModelConfig, Flat]
    optimizer: Annotated[OptimizerConfig, Flat]
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    hosts: HostsConfig = HostsConfig()
    """The processes."""
    objective: LossKind = "squared"
    """What training makes small: squared or absolute errors, in normalised units."""
    center: Center = "last"
    """What is subtracted from a window and added to the forecast, as the level of a season is another one in the next:
    the last row that is known (Zeng et al. 2023, NLinear), the mean of what is known (Kim et al. 2022, RevIN, of which
    this is the half), or nothing."""

    def __post_init__(self):
        check_choice("objective", self.objective, get_args(LossKind))
        check_choice("center", self.center, get_args(Center))


@dataclasses.dataclass(frozen=True)
class TokenForecastConfig:
    """A decoder of a series' tokens."""

    loop: Annotated[LoopConfig, Flat]
    data: Annotated[TokenSeriesConfig, Flat]
    model: Annotated[TokenModelConfig, Flat]
    optimizer: Annotated[OptimizerConfig, Flat]
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    hosts: HostsConfig = HostsConfig()
    """The processes."""


AnyForecastConfig = ForecastConfig | TokenForecastConfig


def read_forecast_config(path: Any) -> AnyForecastConfig:
    """The configuration that a run of train.forecast kept. Raises UserError as `train.config.read_json`."""
    try:
        is_tokens = "bins" in json.loads(epath.Path(path).read_text())["data"]
    except (OSError, ValueError, KeyError, TypeError):
        is_tokens = False  # the reader below says what is wrong
    return read_json(TokenForecastConfig, path) if is_tokens else read_json(ForecastConfig, path)


def _loop() -> LoopConfig:
    return LoopConfig(
        steps=1_000, batch=32, eval_every=100, checkpoint_every=100, patience=5, keep_checkpoints=1
    )


_SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "dropout": 0.1}

PRESETS: dict[str, AnyForecastConfig] = {
    "encoder": ForecastConfig(
        loop=_loop(),
        data=SeriesConfig(),
        model=ForecastModelConfig(**_SIZES, mechanism=FullConfig()),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98),
    ),
    "tokens": TokenForecastConfig(
        loop=_loop(),
        data=TokenSeriesConfig(),
        model=TokenModelConfig(**_SIZES, mechanism=FullConfig()),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98),
    ),
}
