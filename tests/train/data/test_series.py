"""A table of numbers by date, checked by hand."""

import numpy as np
import pytest

from train.data.kernel_series import bank, kernel_series
from train.data.series import SeriesConfig, load_series


@pytest.mark.parametrize(("minutes", "day"), [(360, 4), (420, None), (1440, None)])
def test_clock_day_and_training_mean(tmp_path, minutes, day):
    start = np.datetime64("2024-02-29T06:30", "m")  # a Thursday
    rows = [f"{start + np.timedelta64(i * minutes, 'm')},{i},{7 * (i < 4)}" for i in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["date,a,b", *rows]))
    series = load_series(
        SeriesConfig(
            data=str(tmp_path / "t.csv"),
            target="a",
            features="multivariate",
            split=(3, 1, 2),
            lookback=1,
            horizon=1,
        )
    )
    assert series.day == day
    assert series.columns == ("a", "b")
    hour, weekday = 2 * np.pi * 6.5 / 24, 2 * np.pi * 3 / 7
    expected = [np.sin(hour), np.cos(hour), np.sin(weekday), np.cos(weekday)]
    np.testing.assert_allclose(series.clock[0], expected, atol=1e-6)
    # Statistics of the first three rows only; a constant column keeps its scale.
    np.testing.assert_allclose(series.mean, [1, 7])
    np.testing.assert_allclose(series.deviation, [(2 / 3) ** 0.5, 1])


def test_series_of_random_kernels():
    """A column depends on its number alone, all are finite, and they differ in how they change from row to row."""
    two, five = kernel_series(96, 2), kernel_series(96, 5)
    np.testing.assert_array_equal(five[:, :2], two)
    assert np.isfinite(five).all()
    changes = np.abs(np.diff(five, axis=0)).mean(axis=0) / five.std(axis=0)
    assert changes.max() > 3 * changes.min()
    assert not np.allclose(kernel_series(96, 2, seed=1), two)


def test_kernels_are_what_their_names_say():
    """At one row's distance and at a period's, by hand: the first kernel has a period of 24 rows."""
    kernels = bank(48)
    t, s = np.array(0.25), np.array(0.75)  # 24 of 48 rows apart
    assert kernels[0](t, s) == pytest.approx(1.0)
    assert kernels[0](t, t + 6 / 48) == pytest.approx(np.exp(-1))
    # From the last: a constant, two of noise, three of each of the others, whose middle one is of size 1.
    noise, rational, smooth, linear = (kernels[-i] for i in (2, 5, 8, 11))
    assert [noise(t, s), noise(t, t)] == [0.0, 1.0]
    assert rational(t, s) == pytest.approx(1 / (1 + 0.125))
    assert smooth(t, s) == pytest.approx(np.exp(-0.125))
    assert linear(t, s) == pytest.approx(1 + 0.1875)


def test_a_table_of_kernels():
    config = SeriesConfig(
        data="kernels:3", target="k1", features="multivariate", split=(40, 10, 14), lookback=8, horizon=4
    )
    series = load_series(config)
    assert (series.columns, series.values.shape, series.day) == (("k0", "k1", "k2"), (64, 3), 24)
    alone = load_series(
        SeriesConfig(data="kernels:3", target="k1", split=(40, 10, 14), lookback=8, horizon=4)
    )
    np.testing.assert_array_equal(alone.values[:, 0], series.values[:, 1])
