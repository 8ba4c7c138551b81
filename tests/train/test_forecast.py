"""Forecasting: splits and windows, the commands as a user runs them, and naive forecasts for comparison."""

import csv
import datetime
import gzip
import json

import jax
import numpy as np
import pytest

import eval.tasks.forecast
import train.forecast
from eval.tasks.forecast import markdown
from tests.support.command_lines import config_of, last_wins
from tests.support.texts import damage
from train.data.series import (
    HeldOutWindows,
    SeriesConfig,
    Windows,
    WindowStream,
    load_series,
    naive_forecast,
    origins,
)
from train.data.series_tokens import TokenSeriesConfig, TokenWindows, column_origins, to_numbers, to_tokens
from train.engine.errors import UserError
from train.tasks.forecast import FORECAST, FORECAST_TASKS, FORECAST_TOKENS, forecast
from train.tasks.task import read_config

ROWS = 240
TINY = (
    "--lookback 30 --horizon 6 --split 120 60 60 --valid_stride 7 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 "
    "--batch 4 --warmup_steps 1 --steps 4 --eval_every 2 --checkpoint_every 2 --tensorboard False"
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("data") / "waves.csv.gz", 60)


def write_table(path, minutes):
    """A table with two columns, a daily wave and a climbing one, and a row every `minutes` minutes."""
    start = datetime.datetime(2016, 7, 1)
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["date", "load", "OT"])
        for i in range(ROWS):
            wave = np.sin(2 * np.pi * i * minutes / (24 * 60))
            writer.writerow(
                [start + datetime.timedelta(minutes=i * minutes), 3 * wave + 5, 10 + wave + 0.01 * i]
            )
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, table):
    """A folder with a finished run of each model."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "encoder", table, "encoder", "--features multivariate")
    run(folder / "tokens", table, "tokens", "--bins 32")
    return folder


def run(workdir, table, preset, more=""):
    train.forecast.main(last_wins(f"{preset} --workdir {workdir} --data {table} {TINY} {more}"))


def config_for(table, **changes):
    return SeriesConfig(data=str(table), lookback=30, horizon=6, split=(120, 60, 60), **changes)


def test_splits_are_the_standard_ones():
    config = SeriesConfig(data="x", lookback=96, horizon=720)
    train_rows, valid, test = (origins(config, split) for split in ("train", "valid", "test"))
    assert (train_rows[0], train_rows[-1] + 720) == (96, 8640)
    assert (valid[0], valid[-1] + 720) == (8640, 11520)
    assert (test[0], test[-1] + 720, len(test)) == (11520, 14400, 2880 - 720 + 1)


def test_a_column_that_training_rows_do_not_change_keeps_its_unit(tmp_path):
    """The deviation of 120 copies of 3.3 is not 0 but about 1e-15; dividing later rows by it would blow them up."""
    start, path = datetime.datetime(2016, 7, 1), tmp_path / "level.csv"
    rows = [(start + datetime.timedelta(hours=i), 3.3 if i < 120 else 4.3) for i in range(ROWS)]
    path.write_text("date,OT\n" + "".join(f"{time},{value}\n" for time, value in rows))
    assert np.full((120, 1), 3.3).std(axis=0) > 0
    normalised = load_series(config_for(path)).normalised[:, 0]
    np.testing.assert_allclose(normalised, np.arange(ROWS) >= 120, atol=1e-6)


def test_a_table_with_a_byte_order_mark(table, tmp_path):
    """As spreadsheets write it."""
    marked = tmp_path / "marked.csv"
    marked.write_bytes(b"\xef\xbb\xbf" + gzip.decompress(table.read_bytes()))
    np.testing.assert_array_equal(
        load_series(config_for(marked)).values, load_series(config_for(table)).values
    )


def test_windows_hold_what_was_known_and_what_came(table):
    config = config_for(table)
    series = load_series(config)
    batch = Windows(series, config).batch(np.array([40, 90]), np.array([True, False]))
    np.testing.assert_array_equal(batch["values"][1, :, 0], series.normalised[60:96, 0])
    np.testing.assert_array_equal(batch["weights"][0], np.arange(36) >= 30)
    assert not batch["weights"][1].any()
    held = list(HeldOutWindows(Windows(series, config), origins(config, "valid", 7), batch=4))
    assert sum(part["weights"].sum() for part in held) == 6 * len(range(120, 175, 7))
    starts = origins(config, "train")
    stream = WindowStream(Windows(series, config), starts, seed=0, batch=10, digest=series.digest)
    firsts = np.concatenate([next(stream)["values"][:, :4, 0] for _ in range(8)])
    assert len(np.unique(firsts, axis=0)) == 80  # no window twice in a pass


def test_naive_forecasts():
    known = np.arange(6.0).reshape(1, 6, 1)
    np.testing.assert_array_equal(naive_forecast(known, 3)[0, :, 0], [5, 5, 5])
    np.testing.assert_array_equal(naive_forecast(known, 5, season=3)[0, :, 0], [3, 4, 5, 3, 4])
    with pytest.raises(ValueError, match="season must be 1 to the 6 known rows, got 7"):
        naive_forecast(known, 2, season=7)


def test_tokens_are_bins_of_the_scaled_series(table):
    config = TokenSeriesConfig(
        data=str(table),
        features="multivariate",
        lookback=30,
        horizon=6,
        split=(120, 60, 60),
        bins=201,
        limit=4.0,
    )
    series = load_series(config)
    windows = TokenWindows(series, config)
    origin = column_origins(np.array([50]), 2)
    tokens, scale = windows.known(origin)
    np.testing.assert_allclose(scale[:, 0], np.abs(series.values[20:50]).mean(axis=0))
    # A bin is 8 / 200 wide, so its center is at most 0.02 off.
    off = to_numbers(tokens, config) * scale - series.values[20:50].T
    assert np.abs(off / scale).max() <= 0.02 + 1e-9
    batch = windows.batch(origin)
    np.testing.assert_array_equal(batch["source"], tokens)
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    np.testing.assert_array_equal(batch["tokens"][:, 0], 201)
    came = to_numbers(batch["targets"], config) * scale - series.values[50:56].T
    assert np.abs(came / scale).max() <= 0.02 + 1e-9
    np.testing.assert_array_equal(
        to_tokens(np.array([-9.0, -4.0, 0.0, 4.0, 9.0]), config), [0, 0, 100, 200, 200]
    )


def test_blocks_follow_the_length_of_their_own_sequence():
    config = config_of(FORECAST_TOKENS, "chronos-tiny --mechanism mlr")
    model = FORECAST_TOKENS.sized(config).model
    assert (model.encoder.mechanism.context, model.mechanism.context) == (512, 64)
    assert FORECAST_TOKENS.sized(FORECAST_TOKENS.presets["tokens"]).model.encoder_mechanism is None


@pytest.mark.slow
@pytest.mark.parametrize("center", ["last", "mean", "none"])
def test_a_forecast_does_not_read_what_came(table, center):
    config = config_of(FORECAST, f"encoder --data {table} {TINY} --center {center}")
    series = load_series(config.data)
    config = FORECAST.sized(config, series)
    model = FORECAST.build(config)
    batch = Windows(series, config.data).batch(np.array([60, 70])).arrays
    init = FORECAST.objective(model, config).init(jax.random.key(0))
    params = jax.tree.map(lambda box: box.unbox() + 0.1, init, is_leaf=lambda leaf: hasattr(leaf, "unbox"))
    first = np.asarray(forecast(model, config, params, batch))
    if center == "last":  # an untrained model gives the naive forecast
        known = batch["values"][:, :30].astype(np.float64)
        start = forecast(model, config, jax.tree.map(np.zeros_like, params), batch)
        np.testing.assert_array_equal(start, naive_forecast(known, 6).astype(np.float32))
    hidden = batch["values"].copy()
    hidden[:, 30:] = np.nan
    np.testing.assert_array_equal(forecast(model, config, params, batch | {"values": hidden}), first)
    # Centered: adding a constant to the inputs adds it to the forecast.
    lifted = forecast(model, config, params, batch | {"values": batch["values"] + np.float32(2)})
    moves = np.allclose(lifted, first + 2, rtol=1e-4, atol=1e-4)
    assert moves == (center != "none")


@pytest.mark.slow
def test_commands(runs, capsys):
    picture = runs / "forecasts.png"
    eval.tasks.forecast.main(
        f"--workdir {runs}/encoder {runs}/tokens --picture {picture} --stride 11 --samples 3".split()
    )
    encoder, tokens = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert encoder["windows"] == tokens["windows"] == len(range(180, 235, 11))
    assert (encoder["model"], tokens["model"]) == ("full", "tokens: full")
    series = load_series(read_config(FORECAST_TASKS, runs / "tokens" / "config.json")[1].data)
    rows = np.arange(180, 235, 11)
    came = np.stack([series.normalised[row : row + 6] for row in rows])
    last = np.stack([series.normalised[row - 1 : row] for row in rows])
    day = np.stack([series.normalised[row - 24 : row - 18] for row in rows])
    assert tokens["naive"]["mae"] == pytest.approx(float(np.abs(came - last).mean()), rel=1e-5)
    assert tokens["seasonal_naive"]["mse"] == pytest.approx(float(np.square(came - day).mean()), rel=1e-5)
    for result in (encoder, tokens):
        assert np.isfinite([result["mae"], result["mse"]]).all()
        assert 0 <= result["coverage"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (runs / "encoder" / "forecast_test.json").exists()  # only the standard measurement is kept
    eval.tasks.forecast.main(["--table", str(runs)])
    text = capsys.readouterr().out
    assert "| waves, multivariate | 6 | the last row |" in text
    assert "| waves, univariate | 6 | tokens: full |" in text


@pytest.mark.slow
def test_the_naive_forecast_of_a_day_follows_the_dates(tmp_path, capsys):
    """A daily wave in rows of an hour and a half, so repeating the last day is exact."""
    run(tmp_path / "run", write_table(tmp_path / "waves.csv.gz", 90), "encoder", "--target load")
    eval.tasks.forecast.main(["--workdir", str(tmp_path / "run")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["seasonal_naive"]["mae"] < 1e-5 < result["naive"]["mae"]


def test_seeds_are_averaged():
    plain = {"mae": 1.0, "mse": 2.0}
    result = {
        "data": "d", "features": "univariate", "horizon": 3, "model": "m", "parameters": 5, "naive": plain,
        "seasonal_naive": None, "mse": 0.5, "coverage": 0.8,
    }  # fmt: skip
    text = markdown([result | {"mae": mae, "seed": seed} for seed, mae in enumerate((0.1, 0.2, 0.3))])
    assert "| d, univariate | 3 | m | 0.200 ± 0.100 | 0.500 ± 0.000 | 0.800 ± 0.000 | 0, 1, 2 |" in text
    assert text.count("the last row") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--horizon 61",
            r"--horizon must be at most 60, what a split of \(120, 60, 60\) rows leaves .*, got 61",
        ),
        ("--lookback 120", r"--horizon must be at most 0, .* a lookback of 120, got 6"),
        ("--split 200 60 60", r"--split: .*waves.csv.gz has 240 rows, got \(200, 60, 60\), which take 320"),
        ("--target oil", "--target: expected one of load, OT, got oil"),
        ("--mechanism deltanet", "--mechanism: .*no bidirectional form"),
    ],
)
def test_bad_options(table, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", table, "encoder", options)
    assert not (tmp_path / "run").exists()


TABLE = "date,OT\n" + "".join(f"2016-07-01 0{i}:00:00,{i}\n" for i in range(4))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("date", "time", "--data: expected a first column 'date'"),
        *((",2", f",{x}", rf"csv, row 3: expected a date .* got '2016-07-01 02:00:00,{x}'")
          for x in ("many", "", "nan", "inf", "1e39")),
        (",0\n", ",0\n\n", r"csv, row 2: expected a date .* got ''"),
        ("02:00:00", "01:00:00", "got 2016-07-01 01:00:00 after 2016-07-01 01:00:00 in row 3"),
        ("02:00:00", "00:00:00", "got 2016-07-01 00:00:00 after 2016-07-01 01:00:00 in row 3"),
        ("02:00:00", "02:00:00+00:00", "all with or all without a time zone"),
        ("02:00:00", "yesterday:00:00", "row 3: expected a date .* got '2016-07-01 yesterday"),
        ("date,OT", f"date,{'x' * 200_000}", "table.csv cannot be read: field larger than field limit"),
        ("date,OT", "date,OT,OT", r"--data: .* has two columns 'OT'; expected one of each name"),
    ],
)  # fmt: skip
def test_bad_tables(tmp_path, old, new, message):
    config = SeriesConfig(data=str(tmp_path / "table.csv"), lookback=1, horizon=1, split=(2, 1, 1))
    for end in ("\n", "\r\n", "\r"):
        (tmp_path / "table.csv").write_bytes(TABLE.replace("\n", end).encode())
        assert len(load_series(config).values) == 4
    (tmp_path / "table.csv").write_text(TABLE.replace(old, new))
    with pytest.raises(UserError, match=message):
        load_series(config)


def test_tables_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"--data: expected a .csv or .csv.gz file, got none"):
        load_series(SeriesConfig())
    (tmp_path / "damaged.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    damage(tmp_path / "damaged.csv.gz")
    with pytest.raises(UserError, match=r"--data: .*damaged.csv.gz cannot be read: .*invalid block type"):
        load_series(SeriesConfig(data=str(tmp_path / "damaged.csv.gz")))
    with pytest.raises(UserError, match=r"--data: .*nothing.csv cannot be read"):
        load_series(SeriesConfig(data=str(tmp_path / "nothing.csv")))
