"""A table of numbers by date, checked by hand."""

import numpy as np
import pytest

from train.data.series import SeriesConfig, load_series


@pytest.mark.parametrize(("minutes", "day"), [(360, 4), (420, None), (1440, None)])
def test_clock_day_and_training_mean(tmp_path, minutes, day):
    start = np.datetime64("2024-02-29T06:30", "m")  # a Thursday
    rows = [f"{start + i * minutes},{i},{7 * (i < 4)}" for i in range(6)]
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
