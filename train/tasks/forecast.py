"""The two tasks of `python -m train.forecast`: an encoder that forecasts the whole horizon at once, and an
encoder-decoder of tokens."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from brl_jax.layers import FullConfig
from brl_jax.models import EncoderDecoder, Regressor, RegressorConfig
from train.data.series import (
    CLOCK,
    HeldOutWindows,
    Series,
    SeriesConfig,
    Windows,
    WindowStream,
    load_series,
    origins,
)
from train.data.series_tokens import TokenSeriesConfig, TokenWindows, column_origins
from train.engine.batch import Arrays
from train.engine.config import LoopConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, outputs
from train.tasks.copy import CopyModelConfig, copy_objective
from train.tasks.run_config import RunConfig
from train.tasks.task import Task, objective_of, shapes

LossKind = Literal["squared", "absolute"]
Center = Literal["last", "mean", "none"]


@dataclasses.dataclass(frozen=True)
class ForecastModelConfig(RegressorConfig):
    """The network."""

    is_causal: Decided[bool] = False
    num_inputs: Decided[int] = 1
    num_outputs: Decided[int] = 1
    max_length: Decided[int] = 1024


@dataclasses.dataclass(frozen=True)
class ForecastConfig(RunConfig):
    """An encoder that reads what is known, and empty tokens for the horizon, whose values it predicts."""

    data: Annotated[SeriesConfig, Flat]
    model: Annotated[ForecastModelConfig, Flat]
    objective: LossKind = "squared"
    """What training minimises: squared or absolute errors, in normalised units."""
    center: Center = "last"
    """What is subtracted from a window and added to the forecast, because the level differs from season to season: the
    last known row (NLinear, Zeng et al. 2023, arXiv:2205.13504), the mean of the known rows (half of RevIN, Kim et al.
    2022), or nothing."""

    def without_effect(self) -> dict[str, str]:
        return super().without_effect() | {"z_loss": "with errors of numbers, which have no softmax"}


@dataclasses.dataclass(frozen=True)
class TokenForecastConfig(RunConfig):
    """An encoder-decoder that reads a series' tokens and writes the ones that follow."""

    data: Annotated[TokenSeriesConfig, Flat]
    model: Annotated[CopyModelConfig, Flat]


AnyForecastConfig = ForecastConfig | TokenForecastConfig
F = TypeVar("F", ForecastConfig, TokenForecastConfig)


_LOOP = LoopConfig(
    steps=1_000, batch=32, eval_every=100, checkpoint_every=100, patience=5, keep_checkpoints=1
)
_SIZES: dict[str, Any] = {"num_layers": 2, "d_model": 64, "num_heads": 4, "d_ff": 128, "dropout": 0.1}
_OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=50, weight_decay=0.05, beta2=0.98)

_ENCODER = ForecastConfig(
    loop=_LOOP,
    data=SeriesConfig(),
    model=ForecastModelConfig(**_SIZES, mechanism=FullConfig()),
    optimizer=_OPTIMIZER,
)
_TOKENS = TokenForecastConfig(
    loop=_LOOP,
    data=TokenSeriesConfig(),
    model=CopyModelConfig(**_SIZES, encoder_layers=2, mechanism=FullConfig()),
    optimizer=_OPTIMIZER,
)
# Series of 1,024 rows, as in Chronos, without a file.
_TOKENS_OF_KERNELS = dataclasses.replace(
    _TOKENS,
    data=TokenSeriesConfig(data="kernels:256", features="multivariate", target="k0", split=(640, 192, 192)),
)
# Chronos's smallest network and its training, scripts/training/configs/chronos-t5-tiny.yaml of its authors' code.
_CHRONOS = TokenForecastConfig(
    loop=LoopConfig(steps=200_000, batch=256, eval_every=2_000, checkpoint_every=1_000, keep_checkpoints=1),
    data=dataclasses.replace(
        _TOKENS_OF_KERNELS.data, data="kernels:1000", lookback=512, horizon=64, bins=4094, limit=15.0
    ),
    model=CopyModelConfig(
        num_layers=4,
        encoder_layers=4,
        d_model=256,
        num_heads=4,
        d_ff=1024,
        ffn="relu",
        dropout=0.1,
        mechanism=FullConfig(),
    ),
    optimizer=OptimizerConfig(
        learning_rate=1e-3, warmup_steps=0, decay="linear", final_share=0.0, beta2=0.999, weight_decay=0.0
    ),
)


def forecast(
    model: Regressor, config: ForecastConfig, params: Any, batch: Arrays, key: Array | None = None
) -> Float[Array, "B H C"]:
    """The rows after the known ones, in normalised units. `batch` is what `Windows` gives; the values of the rows to
    forecast are not read."""
    known = batch["values"][:, : config.data.lookback]
    match config.center:
        case "last":
            level = known[:, -1:]
        case "mean":
            level = known.mean(axis=1, keepdims=True)
        case _:
            level = jnp.zeros_like(known[:, :1])
    empty = ((0, 0), (0, config.data.horizon), (0, 0))
    tokens = jnp.concatenate(
        [jnp.pad(known - level, empty), jnp.pad(jnp.ones_like(known[..., :1]), empty), batch["clock"]],
        axis=-1,
    )
    return outputs(model, params, key, tokens)[:, config.data.lookback :] + level


def forecast_objective(model: Regressor, config: ForecastConfig) -> Objective:
    """Squared or absolute errors, the mean over columns and rows to forecast; "mae" and "mse" are reported."""
    columns = model.config.num_outputs
    lookback = config.data.lookback

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        off = forecast(model, config, params, batch, key) - batch["values"][:, lookback:]
        weights = batch["weights"][:, lookback:]
        sums = {
            "mae": jnp.sum(jnp.abs(off).sum(-1) * weights) / columns,
            "mse": jnp.sum(jnp.square(off).sum(-1) * weights) / columns,
        }
        total = sums["mse"] if config.objective == "squared" else sums["mae"]
        return total, jnp.sum(weights), memory, sums

    inputs = np.zeros((1, 2, model.config.num_inputs), np.float32)
    return objective_of(model, [inputs], loss, averages=("mae", "mse"))


class _SeriesTask(Task[F, Series]):
    """What both forecasters have in common: windows of one table. Their data are the table."""

    about = "Trains a forecaster of time series."
    is_sized_by_data = True
    following = (
        "eval.forecast --workdir {run}",
        "eval.forecast --workdir {run} --picture {run}/forecast.png",
    )

    def load(self, config: F, splits: Sequence[str]) -> Series:
        return load_series(config.data)

    @abc.abstractmethod
    def windows(self, config: F, series: Series) -> Any:
        """What makes batches of windows."""

    @abc.abstractmethod
    def origins(self, config: F, series: Series, split: str, stride: int) -> Any:
        """Where the windows of a split begin to forecast."""

    def describe_data(self, config: F, data: Series) -> str:
        windows = len(self.origins(config, data, "train", 1))
        return f"{config.data.data}, columns {', '.join(data.columns)}, {windows:,} windows train"

    def training_batches(self, config: F, data: Series, **options: Any) -> WindowStream:
        origins = self.origins(config, data, "train", 1)
        return WindowStream(self.windows(config, data), origins, digest=data.digest, **options)

    def held_out_batches(self, config: F, data: Series, split: str, **options: Any) -> HeldOutWindows:
        origins = self.origins(config, data, split, config.data.valid_stride)
        return HeldOutWindows(self.windows(config, data), origins, **options)


class ForecastTask(_SeriesTask[ForecastConfig]):
    """An encoder that predicts all rows of the horizon at once."""

    name = "forecast"
    config_class = ForecastConfig
    presets: Mapping[str, ForecastConfig] = MappingProxyType({"encoder": _ENCODER})
    default_preset = "encoder"
    network = Regressor

    def sized(self, config: ForecastConfig, data: Series | None = None) -> ForecastConfig:
        """Sets the number of columns from the table, and the length from the windows."""
        if data is None and config.data.features == "multivariate":
            data = load_series(config.data)
        columns = 1 if data is None else len(data.columns)
        length = config.data.lookback + config.data.horizon
        sizes = {"num_inputs": columns + 1 + CLOCK, "num_outputs": columns, "max_length": length}
        return config.changed(model=sizes)

    def objective(self, model: Regressor, config: ForecastConfig) -> Objective:
        return forecast_objective(model, config)

    def batch_shapes(self, config: ForecastConfig, rows: int) -> dict[str, Any]:
        tokens = (rows, config.data.lookback + config.data.horizon)
        values = (*tokens, config.model.num_outputs)
        return shapes({}, {"weights": tokens, "values": values, "clock": (*tokens, CLOCK)})

    def windows(self, config: ForecastConfig, series: Series) -> Windows:
        return Windows(series, config.data)

    def origins(self, config: ForecastConfig, series: Series, split: str, stride: int) -> Any:
        return origins(config.data, split, stride)


class TokenForecastTask(_SeriesTask[TokenForecastConfig]):
    """An encoder-decoder of one column's values as tokens."""

    name = "forecast_tokens"
    config_class = TokenForecastConfig
    presets: Mapping[str, TokenForecastConfig] = MappingProxyType(
        {"tokens": _TOKENS, "tokens-kernels": _TOKENS_OF_KERNELS, "chronos-tiny": _CHRONOS}
    )
    default_preset = "tokens"
    network = EncoderDecoder

    def sized(self, config: TokenForecastConfig, data: Series | None = None) -> TokenForecastConfig:
        """Sets the vocabulary, the bins and the first token. What follows the length is fixed at the lookback in the
        encoder, and at the horizon in the decoder."""
        encoder = config.model.encoder.mechanism.for_training(config.data.lookback)
        model = config.model.for_training(config.data.horizon)
        encoder_mechanism = None if encoder == model.mechanism else encoder
        model = dataclasses.replace(
            model, vocab_size=config.data.bins + 1, encoder_mechanism=encoder_mechanism
        )
        return dataclasses.replace(config, model=model)

    def objective(self, model: EncoderDecoder, config: TokenForecastConfig) -> Objective:
        return copy_objective(model, config.z_loss)

    def batch_shapes(self, config: TokenForecastConfig, rows: int) -> dict[str, Any]:
        source, target = (rows, config.data.lookback), (rows, config.data.horizon)
        integers = {"tokens": target, "source": source, "source_lengths": (rows,), "targets": target}
        return shapes(integers, {"weights": target})

    def windows(self, config: TokenForecastConfig, series: Series) -> TokenWindows:
        return TokenWindows(series, config.data)

    def origins(self, config: TokenForecastConfig, series: Series, split: str, stride: int) -> Any:
        return column_origins(origins(config.data, split, stride), len(series.columns))


FORECAST, FORECAST_TOKENS = ForecastTask(), TokenForecastTask()
FORECAST_TASKS: tuple[Task[Any, Any], ...] = (FORECAST, FORECAST_TOKENS)
