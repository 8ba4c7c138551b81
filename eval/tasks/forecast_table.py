"""Forecasting runs as a table, and their forecasts as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.pictures import line_styles
from train.data.series import Series

Result = Mapping[str, Any]

_SHOWN = 3


class Example(NamedTuple):
    """A series and a run's forecasts of it, in normalised units: the rows at which W windows begin, the true values,
    the forecasts and the ends of their bands."""

    series: Series
    origin: Int[np.ndarray, " W"]
    true: Float[np.ndarray, "W H C"]
    point: Float[np.ndarray, "W H C"]
    low: Float[np.ndarray, "W H C"]
    high: Float[np.ndarray, "W H C"]


def markdown(results: Sequence[Result]) -> str:
    """A row for each model and horizon, averaged over seeds with their standard deviation, and the naive forecasts."""
    places: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        places.setdefault(tuple(result[name] for name in ("data", "features", "horizon")), []).append(result)
    groups = {
        (*place, model): runs
        for place, own in places.items()
        for model, runs in alike(own, lambda result: result["model"]).items()
    }
    lines = [
        "| data | horizon | forecast | MAE | MSE | within the 80% band | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    before = ""
    for key, runs in sorted(groups.items(), key=lambda item: item[0]):
        where = f"| {key[0]}, {key[1]} | {key[2]} |"
        if where != before:
            for name, words in (("naive", "the last row"), ("seasonal_naive", "the last day")):
                plain = runs[0][name]
                if plain is not None:
                    lines.append(f"{where} {words} | {plain['mae']:.3f} | {plain['mse']:.3f} | - | - |")
            before = where
        cells = [_cell([run[name] for run in runs]) for name in ("mae", "mse", "coverage")]
        seeds = ", ".join(str(run["seed"]) for run in sorted(runs, key=lambda run: run["seed"]))
        lines.append(f"{where} {key[3]} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    mean = f"{np.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {np.std(values, ddof=1):.3f}"


def draw(runs: Sequence[tuple[Result, Example]]) -> Figure:
    """A panel for each run and window: the known rows, the true ones, the forecast and its band, for the last
    column."""
    figure = Figure(figsize=(5.2 * _SHOWN, 2.9 * len(runs) + 0.8), layout="constrained")
    panels = figure.subplots(len(runs), _SHOWN, squeeze=False)
    styles = line_styles(["true", "forecast"])
    for row, (result, example) in zip(panels, runs):
        series = example.series
        # Spread over the split.
        chosen = np.linspace(0, len(example.origin) - 1, _SHOWN + 2).astype(int)[1:-1]
        for axes, at in zip(row, chosen):
            origin, horizon = int(example.origin[at]), result["horizon"]

            def units(numbers: Any, series: Series = series) -> Any:
                return numbers * series.deviation[-1] + series.mean[-1]

            back = np.arange(-min(result["lookback"], 2 * horizon), 0)
            ahead = np.arange(horizon)
            axes.plot(back, series.values[origin + back, -1], color="#999999", label="known")
            plain = {"linewidth": 1.4, "marker": None}
            axes.plot(ahead, units(example.true[at, :, -1]), label="true", **{**styles["true"], **plain})
            axes.plot(
                ahead, units(example.point[at, :, -1]), label="forecast", **{**styles["forecast"], **plain}
            )
            low, high = (units(end[at, :, -1]) for end in (example.low, example.high))
            axes.fill_between(
                ahead, low, high, alpha=0.25, color=styles["forecast"]["color"], label="80% band"
            )
            axes.set_title(f"{result['model']}, {result['data']} row {origin}")
            axes.grid(True, alpha=0.3)
        row[0].set_ylabel(series.columns[-1])
    for axes in panels[-1]:
        axes.set_xlabel("rows from the forecast's start")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure
