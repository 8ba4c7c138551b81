"""Measures forecasts on the test split beside naive ones: python -m eval.forecast --workdir DIR [DIR ...].

A JSON object a run: mean absolute and mean squared error (`mae`, `mse`) over all windows, rows and columns, in the
usual normalised units, those of repeating the last row (`naive`) and the last day (`seasonal_naive`), and the share of
what came that lay within the band of 80% (`coverage`). A decoder of tokens is sampled: its forecast is the median (for
`mse` the mean) of --samples continuations and its band theirs; an encoder's band is that of its errors on the
validation split. Kept as forecast_test.json in the run's folder.

--picture FILE.png draws forecasts with their bands. python -m eval.forecast --table DIR measures the runs under DIR
that have not been, and prints a table of them as markdown, seeds averaged.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jaxtyping import Float, Int

from brl_jax.attention.core.checks import check_at_least
from brl_jax.decoding import generate
from eval.forecast_table import Example, draw, markdown
from eval.plotting import picture_path, save
from eval.runs import mechanism_names, open_run
from train.config import parse_options
from train.data.files import write_whole
from train.data.series import Series, Windows, load_series, naive_forecast, origins
from train.data.series_tokens import TokenWindows, column_origins, to_numbers
from train.errors import UserError, command
from train.forecast import build_model, forecast, make_objective
from train.forecast_config import AnyForecastConfig, ForecastConfig, TokenForecastConfig, read_forecast_config

_RESULT = "forecast_test.json"
_DAY = 24
_BAND = (0.1, 0.9)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """What to measure."""

    workdir: tuple[str, ...] = ()
    """Folders of runs."""
    table: str | None = None
    """A folder of runs, at any depth; prints a table of them."""
    picture: str | None = None
    """File to draw forecasts of the --workdir runs in (PNG)."""
    checkpoint: str = "best"
    """best (lowest loss on validation data), last, or a step."""
    stride: int = 1
    """Rows between the windows that are measured; 1 is the standard."""
    samples: int = 20
    """Continuations that a decoder of tokens samples for each window."""
    seed: int = 0
    """Of the samples."""

    def __post_init__(self):
        check_at_least(self, "stride", "samples")
        check_at_least(self, "seed", least=0)


class Forecasts(NamedTuple):
    """Of windows that begin at rows `origin`, in normalised units (W, H, C): the median and the mean, and the band's
    ends."""

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
        # The last batch is filled up, so that one program serves.
        chosen = rows[np.minimum(first + np.arange(size), len(rows) - 1)]
        batch = {name: value for name, value in windows.batch(chosen).items() if name != "reset"}
        parts.append(np.asarray(run(params, batch))[: len(rows) - first])
    return np.concatenate(parts)


def _by_tokens(
    config: TokenForecastConfig,
    model: Any,
    params: Any,
    series: Series,
    rows: Int[np.ndarray, " W"],
    options: EvalOptions,
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
    options: EvalOptions,
) -> Forecasts:
    """The forecasts of a run from these rows on."""
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
    """What came, in normalised units."""
    return series.normalised[rows[:, None] + np.arange(config.data.horizon)]


def errors_of(point: Any, mean: Any, came: Any) -> dict[str, float]:
    """Mean absolute error of `point` and mean squared error of `mean`."""
    return {"mae": float(np.abs(point - came).mean()), "mse": float(np.square(mean - came).mean())}


def measure(workdir: str, options: EvalOptions) -> tuple[dict[str, Any], Example]:
    """The errors of a run and what belongs to it, and windows to draw.

    Raises:
      UserError: no run or checkpoint there, or its data cannot be read.
    """
    kept = read_forecast_config(epath.Path(workdir) / "config.json")
    config, model, params, step = open_run(
        type(kept), build_model, lambda model: make_objective(model, kept), workdir, options.checkpoint
    )
    series = load_series(config.data)
    rows = origins(config.data, "test", options.stride)
    made = make_forecasts(config, model, params, series, rows, options)
    came = truth(series, config, rows)
    known = series.normalised[rows[:, None] + np.arange(-config.data.lookback, 0)]
    plain = naive_forecast(known, config.data.horizon)
    result = {
        "model": ("tokens: " if isinstance(config, TokenForecastConfig) else "")
        + mechanism_names(config.model),
        **errors_of(made.median, made.mean, came),
        "coverage": float(((came >= made.low) & (came <= made.high)).mean()),
        "naive": errors_of(plain, plain, came),
        "seasonal_naive": None,
        "data": Path(config.data.data).name.split(".")[0],
        "features": config.data.features,
        "lookback": config.data.lookback,
        "horizon": config.data.horizon,
        "windows": len(rows),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "step": step,
        "seed": config.loop.seed,
        "workdir": workdir,
    }
    if config.data.lookback >= _DAY:
        seasonal = naive_forecast(known, config.data.horizon, _DAY)
        result["seasonal_naive"] = errors_of(seasonal, seasonal, came)
    return result, Example(series, made.origin, came, made.median, made.low, made.high)


def _measure_and_keep(workdir: str, options: EvalOptions) -> tuple[dict[str, Any], Example]:
    result, example = measure(workdir, options)
    if options.checkpoint == "best":
        write_whole(epath.Path(workdir) / _RESULT, json.dumps(result, indent=1) + "\n")
    return result, example


def _runs(folder: Path, options: EvalOptions) -> list[dict[str, Any]]:
    """The results of all forecasting runs under a folder, measured where they have not been."""
    results = []
    for path in sorted(folder.rglob("config.json")):
        try:
            is_ours = "horizon" in json.loads(path.read_text())["data"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_ours:
            kept = path.parent / _RESULT
            known = options.checkpoint == "best" and kept.exists()
            results.append(
                json.loads(kept.read_text()) if known else _measure_and_keep(str(path.parent), options)[0]
            )
    if not results:
        raise UserError(f"--table: no run of train.forecast under {folder}")
    return results


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    options = parse_options(
        EvalOptions(), argv, prog="python -m eval.forecast", about="Measures forecasts beside naive ones."
    )
    if bool(options.workdir) == (options.table is not None):
        raise UserError("--workdir, --table: expected one of the two")
    if options.picture is not None and not options.workdir:
        raise UserError("--picture: expected with --workdir only")
    picture = picture_path(options.picture)
    if options.table is not None:
        print(markdown(_runs(Path(options.table), options)))
        return
    drawn = []
    for workdir in options.workdir:
        result, example = _measure_and_keep(workdir, options)
        print(json.dumps(result), flush=True)
        drawn.append((result, example))
    if picture is not None:
        save(draw(drawn), picture)


if __name__ == "__main__":
    sys.exit(command(main, "eval.forecast"))
