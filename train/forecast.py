"""Trains a forecaster of time series: python -m train.forecast [PRESET] --data FILE [OPTIONS].

encoder   reads `--lookback` rows and as many empty ones as `--horizon` has, and fills those in at once; any listed
          mechanism that has a bidirectional form
tokens    a decoder of one column's values as tokens (Chronos, arXiv:2403.07815), whose forecasts are sampled; any
          listed mechanism that has a causal form

FILE is a table such as ETTh1.csv (a first column "date"; train/data/series.py says how it is split and normalised).
--features multivariate forecasts all columns, else --target alone. The run's folder holds config.json, metrics.jsonl
and checkpoints/; the same command again goes on where the run stopped. `python -m eval.forecast --workdir DIR`
measures it on the test split beside naive forecasts.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.models import DecoderLM, Regressor
from train.config import parse, to_json
from train.data.series import (
    CLOCK,
    HeldOutWindows,
    Series,
    Windows,
    WindowStream,
    load_series,
    origins,
)
from train.data.series_tokens import TokenSeriesConfig, TokenWindows, column_origins
from train.errors import UserError, command
from train.forecast_config import PRESETS, AnyForecastConfig, ForecastConfig, TokenForecastConfig
from train.hosts import join
from train.lm import lm_objective
from train.loop import train
from train.mesh import held_rows, open_mesh
from train.metrics import say
from train.mup import make_rates
from train.step import Batch, Objective


def forecast(
    model: Regressor, config: ForecastConfig, params: Any, batch: Batch, key: Array | None = None
) -> Float[Array, "B H C"]:
    """The rows after those that are known, in normalised units. `batch` as `Windows` gives it; of its values what is to
    be forecast is not read."""
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
    out: Any = model.apply(
        {"params": params},
        tokens,
        deterministic=key is None,
        rngs={} if key is None else {"dropout": key},
    )
    return out[:, config.data.lookback :] + level


def forecast_objective(model: Regressor, config: ForecastConfig) -> Objective:
    """Squared or absolute errors, a mean over columns and rows to forecast; "mae" and "mse" are reported."""
    columns = model.config.num_outputs
    lookback = config.data.lookback

    def init(key: Array) -> Any:
        return model.init(key, jnp.zeros((1, 2, model.config.num_inputs), jnp.float32))["params"]

    def loss(params: Any, memory: Any, batch: Batch, key: Array | None):
        off = forecast(model, config, params, batch, key) - batch["values"][:, lookback:]
        weights = batch["weights"][:, lookback:]
        sums = {
            "mae": jnp.sum(jnp.abs(off).sum(-1) * weights) / columns,
            "mse": jnp.sum(jnp.square(off).sum(-1) * weights) / columns,
        }
        total = sums["mse"] if config.objective == "squared" else sums["mae"]
        return total, jnp.sum(weights), memory, sums

    return Objective(init, loss, lambda rows: None, averages=("mae", "mse"), rates=make_rates(model.config))


def make_objective(model: Any, config: AnyForecastConfig) -> Objective:
    """The objective of either model."""
    if isinstance(config, ForecastConfig):
        return forecast_objective(model, config)
    return lm_objective(model)


def make_windows(series: Series, config: AnyForecastConfig) -> Any:
    """What makes batches of windows for either model."""
    if isinstance(config.data, TokenSeriesConfig):
        return TokenWindows(series, config.data)
    return Windows(series, config.data)


def with_columns(config: AnyForecastConfig, columns: int) -> AnyForecastConfig:
    """The configuration, with what the data decide of the model."""
    data = config.data
    if isinstance(config, TokenForecastConfig):
        assert isinstance(data, TokenSeriesConfig)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=data.bins))
    model = dataclasses.replace(
        config.model,
        num_inputs=columns + 1 + CLOCK,
        num_outputs=columns,
        max_length=data.lookback + data.horizon,
    )
    return dataclasses.replace(config, model=model)


def build_model(config: AnyForecastConfig) -> Regressor | DecoderLM:
    """The model of a configuration (from `with_columns`), tried on a batch's shapes.

    Raises:
      UserError: its parts don't fit each other or the batch.
    """
    rows = config.loop.batch // config.loop.accumulation
    length = config.data.lookback + config.data.horizon

    def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    try:
        model: Regressor | DecoderLM
        if isinstance(config, ForecastConfig):
            model = Regressor(config.model)
            batch = {
                "weights": struct(rows, length),
                "values": struct(rows, length, config.model.num_outputs),
                "clock": struct(rows, length, CLOCK),
            }
        else:
            model = DecoderLM(config.model)
            tokens = struct(rows, length - 1, dtype=jnp.int32)
            batch = {"tokens": tokens, "targets": tokens, "weights": struct(rows, length - 1)}
        objective = make_objective(model, config)
        jax.eval_shape(
            lambda key, batch: objective.sums(objective.init(key), objective.init_memory(rows), batch, key),
            jax.random.key(0),
            batch,
        )
    except ValueError as error:
        raise UserError(f"the model's options do not fit: {error}") from error
    return model


def split_origins(config: AnyForecastConfig, columns: int, split: str, stride: int = 1) -> Any:
    """Where the windows of a split begin to forecast."""
    rows = origins(config.data, split, stride)
    return column_origins(rows, columns) if isinstance(config.data, TokenSeriesConfig) else rows


def main(argv: Sequence[str]) -> None:
    """Trains; see the module's text and --help."""
    config = parse(
        PRESETS, "encoder", argv, prog="python -m train.forecast", about="Trains a forecaster of time series."
    )
    join(config.hosts)
    mesh = open_mesh(config.mesh, config.loop, config.model)
    series = load_series(config.data)
    columns = len(series.columns)
    config = with_columns(config, columns)
    model = build_model(config)
    windows = make_windows(series, config)
    stream = WindowStream(
        windows,
        split_origins(config, columns, "train"),
        batch=config.loop.batch,
        seed=config.loop.seed,
        digest=series.digest,
        rows=held_rows(mesh, config.loop.batch),
    )
    rows = config.loop.batch // config.loop.accumulation
    held_out = HeldOutWindows(
        windows,
        split_origins(config, columns, "valid", config.data.valid_stride),
        batch=rows,
        rows=held_rows(mesh, rows),
    )
    train(
        make_objective(model, config),
        config.loop,
        config.optimizer,
        config=to_json(config),
        stream=stream,
        held_out=held_out,
        mesh=mesh,
    )
    say(f"done: {config.loop.workdir}; python -m eval.forecast --workdir {config.loop.workdir} tests it")


if __name__ == "__main__":
    sys.exit(command(main, "train.forecast"))
