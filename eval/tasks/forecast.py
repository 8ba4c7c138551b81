"""Measures forecasts on the test split beside naive ones: python -m eval.forecast --workdir DIR [DIR ...].

A JSON object a run: mean absolute and mean squared error (`mae`, `mse`) over all windows, rows and columns, in the
usual normalised units, those of repeating the last row (`naive`) and the last day (`seasonal_naive`, null where the
known rows are less than a day or the rows no part of one), and the share of the true values that lie within the band of
80% (`coverage`). A decoder of tokens is sampled: its forecast is the median (for `mse` the mean) of --samples
continuations and its band is theirs; an encoder's band is that of its errors on the validation split. The object is
kept as forecast_test.json in the run's folder.

--picture FILE.png draws forecasts with their bands. python -m eval.forecast --table DIR measures the runs under DIR
that have not been measured, and prints a table of them as markdown, averaged over seeds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from brl_jax.attention.core.checks import check_at_least
from brl_jax.decoding import generate
from brl_jax.fields import Seed, check_fields
from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.forecast_table import Example, draw, markdown
from train.cli.summary import mechanism_names
from train.data.series import Series, Windows, naive_forecast, origins
from train.data.series_tokens import TokenWindows, column_origins, to_numbers
from train.tasks.forecast import (
    FORECAST_TASKS,
    AnyForecastConfig,
    ForecastConfig,
    TokenForecastConfig,
    forecast,
)

_BAND = (0.1, 0.9)


@dataclasses.dataclass(frozen=True)
class ForecastEvalOptions(TableOptions):
    """What to measure."""

    workdir: tuple[str, ...] = ()
    """Folders of runs."""
    stride: int = 1
    """Rows between the windows that are measured; 1 is the standard."""
    samples: int = 20
    """Continuations that a decoder of tokens samples for each window."""
    seed: Seed = 0
    """Seed of the samples."""

    def __post_init__(self):
        check_at_least(self, "stride", "samples")
        check_fields(self)


class Forecasts(NamedTuple):
    """Forecasts of windows, in normalised units (W, H, C): the median, the mean, and the ends of the band; `origin` is
    the first row of each window's horizon."""

    origin: Int[np.ndarray, " W"]
    median: Float[np.ndarray, "W H C"]
    mean: Float[np.ndarray, "W H C"]
    low: Float[np.ndarray, "W H C"]
    high: Float[np.ndarray, "W H C"]


def _by_encoder(
    config: ForecastConfig, model: Any, params: Any, series: Series, rows: Int[np.ndarray, " W"]
) -> Float[np.ndarray, "W H C"]:
    windows = Windows(series, config.data)
    size = config.loop.batch
    run = jax.jit(lambda params, batch: forecast(model, config, params, batch))
    parts = []
    for first in range(0, len(rows), size):
        # The last batch is padded, so that one compiled program serves all.
        chosen = rows[np.minimum(first + np.arange(size), len(rows) - 1)]
        parts.append(np.asarray(run(params, windows.batch(chosen).arrays))[: len(rows) - first])
    return np.concatenate(parts)


def _by_tokens(
    config: TokenForecastConfig,
    model: Any,
    params: Any,
    series: Series,
    rows: Int[np.ndarray, " W"],
    options: ForecastEvalOptions,
) -> Float[np.ndarray, "S W H C"]:
    columns, horizon = len(series.columns), config.data.horizon
    windows = TokenWindows(series, config.data)
    every = column_origins(rows, columns)
    size = config.loop.batch
    parts = []
    for first in range(0, len(every), size):
        known, scale = windows.known(every[np.minimum(first + np.arange(size), len(every) - 1)])
        tokens = generate(
            model,
            {"params": params},
            np.tile(known, (options.samples, 1)),
            max_new_tokens=horizon,
            rng=jax.random.fold_in(jax.random.key(options.seed), first),
        )
        numbers = to_numbers(np.asarray(tokens)[:, -horizon:], config.data)
        drawn = numbers.reshape(options.samples, size, horizon) * scale[None]
        parts.append(drawn[:, : len(every) - first])
    drawn = np.concatenate(parts, axis=1).reshape(options.samples, len(rows), columns, horizon)
    return (np.moveaxis(drawn, 2, 3) - series.mean) / series.deviation


def make_forecasts(
    config: AnyForecastConfig,
    model: Any,
    params: Any,
    series: Series,
    rows: Int[np.ndarray, " W"],
    options: ForecastEvalOptions,
) -> Forecasts:
    """The forecasts of a run for the windows whose horizon begins at these rows."""
    if isinstance(config, ForecastConfig):
        point = _by_encoder(config, model, params, series, rows)
        before = origins(config.data, "valid", config.data.valid_stride)
        errors = truth(series, config, before) - _by_encoder(config, model, params, series, before)
        low, high = np.quantile(errors, _BAND, axis=0)
        return Forecasts(rows, point, point, point + low, point + high)
    drawn = _by_tokens(config, model, params, series, rows, options)
    low, median, high = np.quantile(drawn, (_BAND[0], 0.5, _BAND[1]), axis=0)
    return Forecasts(rows, median, drawn.mean(axis=0), low, high)


def truth(
    series: Series, config: AnyForecastConfig, rows: Int[np.ndarray, " W"]
) -> Float[np.ndarray, "W H C"]:
    """The true values, in normalised units."""
    return series.normalised[rows[:, None] + np.arange(config.data.horizon)]


def errors_of(point: Any, mean: Any, true: Any) -> dict[str, float]:
    """Mean absolute error of `point` and mean squared error of `mean`."""
    return {"mae": float(np.abs(point - true).mean()), "mse": float(np.square(mean - true).mean())}


class _ForecastEvaluation(Evaluation[ForecastEvalOptions]):
    kept = "forecast_test.json"
    drawn = "workdir"

    def is_standard(self, options: ForecastEvalOptions) -> bool:
        own = ForecastEvalOptions()
        same = all(getattr(options, name) == getattr(own, name) for name in ("stride", "samples", "seed"))
        return super().is_standard(options) and same

    def measure(self, run: Run, options: ForecastEvalOptions) -> Measured:
        """The errors of a run and what was measured, and windows to draw."""
        config = run.config
        series = run.task.load(config, ("test",))
        rows = origins(config.data, "test", options.stride)
        made = make_forecasts(config, run.model, run.params, series, rows, options)
        true = truth(series, config, rows)
        known = series.normalised[rows[:, None] + np.arange(-config.data.lookback, 0)]
        plain = naive_forecast(known, config.data.horizon)
        result = {
            "model": ("tokens: " if isinstance(config, TokenForecastConfig) else "")
            + mechanism_names(config.model),
            **errors_of(made.median, made.mean, true),
            "coverage": float(((true >= made.low) & (true <= made.high)).mean()),
            "naive": errors_of(plain, plain, true),
            "seasonal_naive": None,
            "data": Path(config.data.data).name.split(".")[0],
            "features": config.data.features,
            "lookback": config.data.lookback,
            "horizon": config.data.horizon,
            "windows": len(rows),
            **run_facts(run),
        }
        if series.day is not None and config.data.lookback >= series.day:
            seasonal = naive_forecast(known, config.data.horizon, series.day)
            result["seasonal_naive"] = errors_of(seasonal, seasonal, true)
        return Measured(result, Example(series, made.origin, true, made.median, made.low, made.high))

    def draw(self, measured: Sequence[Measured]) -> Figure:
        return draw(measured)


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    _ForecastEvaluation(
        FORECAST_TASKS,
        ForecastEvalOptions(),
        name="eval.forecast",
        about="Measures forecasts beside naive ones.",
        markdown=markdown,
    ).main(argv)
