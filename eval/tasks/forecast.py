"""Compares forecasts on the test split with naive ones: python -m eval.forecast --workdir DIR [DIR ...].

Errors are over all windows, rows and columns, in the usual normalised units. An encoder-decoder of tokens is sampled:
its forecast is the median (for `mse` the mean) of --samples continuations, which also give the 80% band. An encoder's
band comes from its errors on the validation split. `seasonal_naive` repeats the last day; it is null where the known
rows do not cover a day, or a day is not a whole number of rows. --table DIR prints a table of the runs under DIR.
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

from brl_jax.decoding import generate
from brl_jax.fields import Count, Rows, Seed
from eval.harness.groups import alike
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.output import Measured
from eval.harness.pictures import line_styles, panels
from eval.harness.runs import Run, run_facts
from eval.harness.table import Result, Table, mean_deviation, plus_minus, seeds
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
# The most windows that the picture shows of each run.
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class ForecastEvalOptions(TableOptions):
    """What to measure."""

    workdir: tuple[str, ...] = ()  # type: ignore[assignment]
    """Folders of runs."""
    stride: Count = 1
    """Rows between the windows that are measured; 1 is the standard."""
    samples: Rows = 20
    """Continuations that an encoder-decoder of tokens samples for each window."""
    seed: Seed = 0
    """Seed of the samples."""


class Forecasts(NamedTuple):
    """Forecasts of windows in normalised units: the median, the mean, and the ends of the band; `origin` is the first
    row of each window's horizon."""

    origin: Int[np.ndarray, " W"]
    median: Float[np.ndarray, "W H C"]
    mean: Float[np.ndarray, "W H C"]
    low: Float[np.ndarray, "W H C"]
    high: Float[np.ndarray, "W H C"]


class Example(NamedTuple):
    """A series, its true values in the windows of forecasts, in normalised units, and the forecasts."""

    series: Series
    true: Float[np.ndarray, "W H C"]
    made: Forecasts


def _by_encoder(
    config: ForecastConfig, model: Any, params: Any, series: Series, rows: Int[np.ndarray, " W"]
) -> Float[np.ndarray, "W H C"]:
    windows = Windows(series, config.data)
    size = config.loop.batch
    run = jax.jit(lambda params, batch: forecast(model, config, params, batch))
    parts = []
    for first in range(0, len(rows), size):
        # The last batch is padded, so that one compiled program is enough.
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
    columns, horizon, bins = len(series.columns), config.data.horizon, config.data.bins
    windows = TokenWindows(series, config.data)
    every = column_origins(rows, columns)
    size = config.loop.batch
    parts = []
    for first in range(0, len(every), size):
        known, scale = windows.known(every[np.minimum(first + np.arange(size), len(every) - 1)])
        tokens = generate(
            model,
            {"params": params},
            np.full((options.samples * size, 1), bins),
            max_new_tokens=horizon,
            rng=jax.random.fold_in(jax.random.key(options.seed), first),
            source=np.tile(known, (options.samples, 1)),
        )
        # An untrained network may write the token after the bins, too.
        numbers = to_numbers(np.minimum(np.asarray(tokens)[:, 1:], bins - 1), config.data)
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
    """A run's forecasts for the windows with a horizon that begins at these rows."""
    if isinstance(config, ForecastConfig):
        point = _by_encoder(config, model, params, series, rows)
        before = origins(config.data, "valid", config.data.valid_stride)
        errors = truth(series, config, before) - _by_encoder(config, model, params, series, before)
        return with_band(rows, point, errors)
    return of_samples(rows, _by_tokens(config, model, params, series, rows, options))


def with_band(
    rows: Int[np.ndarray, " W"], point: Float[np.ndarray, "W H C"], errors: Float[np.ndarray, "V H C"]
) -> Forecasts:
    """Forecasts with a band that had 80% of earlier errors, for each row of the horizon and column."""
    low, high = np.quantile(errors, _BAND, axis=0)
    return Forecasts(rows, point, point, point + low, point + high)


def of_samples(rows: Int[np.ndarray, " W"], drawn: Float[np.ndarray, "S W H C"]) -> Forecasts:
    """The forecasts of samples: their median, mean and quantiles."""
    low, median, high = np.quantile(drawn, (_BAND[0], 0.5, _BAND[1]), axis=0)
    return Forecasts(rows, median, drawn.mean(axis=0), low, high)


def truth(
    series: Series, config: AnyForecastConfig, rows: Int[np.ndarray, " W"]
) -> Float[np.ndarray, "W H C"]:
    """The true values in normalised units."""
    return series.normalised[rows[:, None] + np.arange(config.data.horizon)]


def errors_of(point: Any, mean: Any, true: Any) -> dict[str, float]:
    """Mean absolute error of `point` and mean squared error of `mean`."""
    return {"mae": float(np.abs(point - true).mean()), "mse": float(np.square(mean - true).mean())}


def coverage(made: Forecasts, true: Float[np.ndarray, "W H C"]) -> float:
    """The share of the true values that lie within the band, ends included."""
    return float(((true >= made.low) & (true <= made.high)).mean())


def measure(run: Run, options: ForecastEvalOptions) -> Measured:
    """The errors of a run and facts about it, and windows to draw."""
    config = run.config
    series = run.task.load(config, ("test",))
    rows = origins(config.data, "test", options.stride)
    made = make_forecasts(config, run.model, run.params, series, rows, options)
    true = truth(series, config, rows)
    known = series.normalised[rows[:, None] + np.arange(-config.data.lookback, 0)]
    plain = naive_forecast(known, config.data.horizon)
    seasonal = None
    if series.day is not None and config.data.lookback >= series.day:
        repeated = naive_forecast(known, config.data.horizon, series.day)
        seasonal = errors_of(repeated, repeated, true)
    kind = "tokens: " if isinstance(config, TokenForecastConfig) else ""
    result = {
        "model": kind + mechanism_names(config.model),
        **errors_of(made.median, made.mean, true),
        "coverage": coverage(made, true),
        "naive": errors_of(plain, plain, true),
        "seasonal_naive": seasonal,
        "data": Path(config.data.data).name.split(".")[0],
        "features": config.data.features,
        "lookback": config.data.lookback,
        "horizon": config.data.horizon,
        "windows": len(rows),
        **run_facts(run),
    }
    return Measured(result, Example(series, true, made))


def markdown(results: Sequence[Result]) -> str:
    """A row for each model and horizon, averaged over seeds with their standard deviation, and for naive forecasts."""
    places: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        places.setdefault(tuple(result[name] for name in ("data", "features", "horizon")), []).append(result)
    table = Table("data", "horizon", "forecast", "MAE", "MSE", "within the 80% band", "seeds")
    for (data, features, horizon), own in sorted(places.items()):
        where = (f"{data}, {features}", horizon)
        groups = sorted(alike(own, lambda result: result["model"]).items())
        for name, words in (("naive", "the last row"), ("seasonal_naive", "the last day")):
            plain = groups[0][1][0][name]
            if plain is not None:
                table.add(*where, words, f"{plain['mae']:.3f}", f"{plain['mse']:.3f}", None, None)
        for model, runs in groups:
            cells = [
                plus_minus(*mean_deviation([run[name] for run in runs]), digits=3)
                for name in ("mae", "mse", "coverage")
            ]
            table.add(*where, model, *cells, seeds(sorted(runs, key=lambda run: run["seed"])))
    return str(table)


def draw(runs: Sequence[Measured]) -> Figure:
    """A row of panels for each run, one for each window, with the last column: the known rows, the true ones, the
    forecast and its band."""
    # With so many, the places below differ.
    shown = max(1, min(_SHOWN, *(len(example.made.origin) - 1 for _, example in runs)))
    figure, axs = panels(len(runs), shown, (5.2 * shown, 2.9 * len(runs) + 0.8))
    styles = {name: {**style, "marker": None} for name, style in line_styles(["true", "forecast"]).items()}
    for row, (result, example) in zip(axs, runs):
        series, made = example.series, example.made
        # Spread over the split.
        chosen = np.linspace(0, len(made.origin) - 1, shown + 2).astype(int)[1:-1]
        for axes, at in zip(row, chosen):
            origin, horizon = int(made.origin[at]), result["horizon"]
            true, point, low, high = (
                numbers[at, :, -1] * series.deviation[-1] + series.mean[-1]
                for numbers in (example.true, made.median, made.low, made.high)
            )
            back = np.arange(-min(result["lookback"], 2 * horizon), 0)
            ahead = np.arange(horizon)
            axes.plot(back, series.values[origin + back, -1], color="#999999", label="known")
            axes.plot(ahead, true, label="true", linewidth=1.4, **styles["true"])
            axes.plot(ahead, point, label="forecast", linewidth=1.4, **styles["forecast"])
            colour = styles["forecast"]["color"]
            axes.fill_between(ahead, low, high, alpha=0.25, color=colour, label="80% band")
            axes.set_title(f"{result['model']}, {result['data']} row {origin}")
        row[0].set_ylabel(series.columns[-1])
    for axes in axs[-1]:
        axes.set_xlabel("rows from the forecast's start")
    handles, names = axs[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure


main = Evaluation(
    FORECAST_TASKS, ForecastEvalOptions(), "eval.forecast", "Compares forecasts with naive ones.", measure,
    markdown, draw, kept="forecast_test.json", drawn="workdir",
).main  # fmt: skip
