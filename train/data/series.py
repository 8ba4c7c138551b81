"""Time series for forecasting: a table of numbers by date, cut in windows of known rows and rows to forecast.

The standard protocol of the ETT data (Zhou et al. 2021, arXiv:2012.07436): the first 12 months train (of 30 days: 8640
hours), the next 4 validate, the 4 after them test; every column is normalised by its mean and deviation over the
training rows; every window of `lookback` rows and the `horizon` rows after them counts. The rows to forecast all lie in
their split, while the known rows may reach back into the split before it.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import hashlib
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from brl_jax.fields import Checked, Count, Length
from brl_jax.json_files import check_regular
from train.data.kernel_series import MOST_ROWS, kernel_series
from train.data.repeated import HeldOutBatches, RepeatedBatches, RowNumbers, chosen_rows
from train.data.splits import SPLITS
from train.engine.batch import Batch
from train.engine.errors import UNREADABLE, UserError, one_line
from train.engine.fields import Needed

Features = Literal["univariate", "multivariate"]
# Numbers that encode the time of a row: sine and cosine of the hour of the day and of the day of the week.
CLOCK = 4


@dataclasses.dataclass(frozen=True)
class SeriesConfig(Checked):
    """The series and its windows."""

    data: Needed[str] = ""
    """A .csv or .csv.gz file: a first column "date" (2016-07-01 00:00:00) and columns of numbers; or kernels:N, which
    draws N columns k0, k1, ... of hourly numbers from Gaussian processes with random kernels."""
    features: Features = "univariate"
    """Forecast the target from its own past ("univariate"), or all columns from their common past ("multivariate")."""
    target: str = "OT"
    """The target's column."""
    lookback: Length = 96
    """Rows that are known."""
    horizon: Length = 96
    """Rows to forecast after them."""
    split: tuple[Count, Count, Count] = (8640, 2880, 2880)
    """Rows to train, validate and test on, in this order from the first."""
    valid_stride: Count = 8
    """Rows between the windows of an evaluation while training."""

    def __post_init__(self):
        most = min(self.split[0] - self.lookback, *self.split[1:])
        if self.horizon > most:
            raise ValueError(
                f"horizon must be at most {max(most, 0)}, what a split of {self.split} rows leaves after a lookback of "
                f"{self.lookback}, got {self.horizon}"
            )
        if self.lookback > self.split[0]:
            raise ValueError(
                f"lookback must be at most the {self.split[0]} training rows, got {self.lookback}"
            )


class Series(NamedTuple):
    """A table: names of its columns, their numbers, (R, 4) the time of each row (see CLOCK), the number of rows in a
    day (None if a row is a day or more, or a day no whole number of rows), and by column the mean and the standard
    deviation of the training rows."""

    columns: tuple[str, ...]
    values: Float[np.ndarray, "R C"]
    clock: Float[np.ndarray, "R 4"]
    day: int | None
    mean: Float[np.ndarray, " C"]
    deviation: Float[np.ndarray, " C"]
    digest: str

    @property
    def normalised(self) -> Float[np.ndarray, "R C"]:
        return ((self.values - self.mean) / self.deviation).astype(np.float32)


def load_series(config: SeriesConfig) -> Series:
    """Reads the columns that the configuration forecasts."""
    names, times, values, digest = (_drawn if config.data.startswith("kernels:") else _read)(config)
    hours = np.array([time.hour + time.minute / 60 for time in times]) / 24
    days = np.array([time.weekday() for time in times]) / 7
    clock = np.stack(
        [wave(2 * np.pi * phase) for phase in (hours, days) for wave in (np.sin, np.cos)], axis=1
    )
    training = values[: config.split[0]]
    # Not by the deviation, which rounding makes nonzero even for equal numbers.
    varies = training.min(axis=0) < training.max(axis=0)
    return Series(
        columns=tuple(names),
        values=values,
        clock=clock.astype(np.float32),
        day=_rows_of_a_day(times),
        mean=training.mean(axis=0),
        deviation=np.where(varies, training.std(axis=0), 1.0),
        digest=digest,
    )


_Table = tuple[list[str], list[datetime.datetime], Float[np.ndarray, "R C"], str]


def _chosen(config: SeriesConfig, names: list[str]) -> list[int]:
    if config.target not in names:
        raise UserError(f"--target: expected one of {', '.join(names)}, got {config.target}")
    return [names.index(config.target)] if config.features == "univariate" else list(range(len(names)))


def _drawn(config: SeriesConfig) -> _Table:
    """The columns of kernels:N."""
    count, rows = config.data.removeprefix("kernels:"), sum(config.split)
    if not re.fullmatch("[1-9][0-9]{0,3}", count):
        raise UserError(f"--data: expected kernels:N with 1 to 9999 columns, got {config.data}")
    if rows > MOST_ROWS:
        raise UserError(f"--split: expected at most {MOST_ROWS} rows in all with {config.data}, got {rows}")
    chosen = _chosen(config, [f"k{i}" for i in range(int(count))])
    start = datetime.datetime(2000, 1, 1)
    times = [start + datetime.timedelta(hours=row) for row in range(rows)]
    values = kernel_series(rows, int(count))[:, chosen]
    return [f"k{i}" for i in chosen], times, values, hashlib.sha256(values.tobytes()).hexdigest()[:16]


def _read(config: SeriesConfig) -> _Table:
    """The columns of a file."""
    path = Path(config.data).expanduser()
    if not config.data:
        raise UserError("--data: expected a .csv or .csv.gz file, got none")
    try:
        check_regular(path)
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
        rows = list(csv.reader(io.StringIO(text, newline=None)))  # "\r" ends the lines of some spreadsheets
    except (*UNREADABLE, ValueError, csv.Error) as error:
        raise UserError(f"--data: {path} cannot be read: {one_line(error)}") from error
    if len(rows) < 2 or len(rows[0]) < 2 or rows[0][0] != "date":
        raise UserError(f"--data: expected a first column 'date' and columns of numbers in {path}")
    names = rows[0][1:]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--data: {path} has two columns {twice!r}; expected one of each name")
    chosen = _chosen(config, names)
    needed = sum(config.split)
    if len(rows) - 1 < needed:
        raise UserError(f"--split: {path} has {len(rows) - 1} rows, got {config.split}, which take {needed}")
    times, numbers = [], []
    for number, row in enumerate(rows[1 : needed + 1], 1):
        try:
            times.append(datetime.datetime.fromisoformat(row[0]))
            numbers.append([float(row[1 + column]) for column in chosen])
        except (ValueError, IndexError) as error:
            raise _wrong_row(path, number, row) from error
    values = np.array(numbers)
    # The network reads float32. Of NaN, too, no comparison is true.
    fits = (np.abs(values) <= np.finfo(np.float32).max).all(axis=1)
    if not fits.all():
        number = int(np.argmin(fits)) + 1
        raise _wrong_row(path, number, rows[number])
    try:
        late = next((i for i in range(1, len(times)) if times[i] <= times[i - 1]), None)
    except TypeError as error:
        raise UserError(f"--data: expected dates all with or all without a time zone in {path}") from error
    if late is not None:
        raise UserError(
            f"--data: expected dates that ascend, each once, got {rows[late + 1][0]} after {rows[late][0]} in row "
            f"{late + 1} of {path}"
        )
    return [names[column] for column in chosen], times, values, hashlib.sha256(raw).hexdigest()[:16]


def _wrong_row(path: Path, number: int, row: Sequence[str]) -> UserError:
    return UserError(
        f"--data: {path}, row {number}: expected a date (2016-07-01 00:00:00) and numbers within float32, "
        f"got {','.join(row)[:60]!r}"
    )


def _rows_of_a_day(times: Sequence[datetime.datetime]) -> int | None:
    """See `Series`. The median decides, as rows may be missing."""
    steps = sorted(after - before for before, after in itertools.pairwise(times))
    rows, rest = divmod(datetime.timedelta(days=1), steps[len(steps) // 2])
    return rows if rows > 1 and not rest else None


def origins(config: SeriesConfig, split: str, stride: int = 1) -> Int[np.ndarray, " W"]:
    """The first row that each window of a split forecasts."""
    at = SPLITS.index(split)
    first = sum(config.split[:at]) or config.lookback
    return np.arange(first, sum(config.split[: at + 1]) - config.horizon + 1, stride)


class Windows:
    """Batches of windows by their origins.

    A batch is {"weights": (B, L + H) float32, 1 on the rows to forecast and 0 elsewhere, "values": (B, L + H, C)
    float32, normalised, "clock": (B, L + H, 4) float32}, L the lookback and H the horizon.
    """

    def __init__(self, series: Series, config: SeriesConfig):
        self.config = config
        self._values, self._clock = series.normalised, series.clock
        self._places = np.arange(-config.lookback, config.horizon)

    def batch(self, origin: Int[np.ndarray, " B"], exists: Any = True) -> Batch:
        """The windows that forecast from these rows on; weights are 0 where `exists` (B,) is False."""
        rows = origin[:, None] + self._places
        counts = (self._places >= 0)[None] & np.broadcast_to(exists, origin.shape)[:, None]
        return Batch(
            {
                "weights": counts.astype(np.float32),
                "values": self._values[rows],
                "clock": self._clock[rows],
            }
        )


class WindowStream(RepeatedBatches):
    """Endless training batches: each pass has every window at most once, in an order that depends only on the seed and
    the pass's number.
    """

    def __init__(
        self,
        windows: Windows,
        origin: Int[np.ndarray, " W"],
        *,
        batch: int,
        seed: int,
        digest: str,
        rows: RowNumbers = None,
    ):
        chosen = chosen_rows(batch, rows)
        if len(origin) < batch:
            raise UserError(f"--batch: expected at most the {len(origin)} training windows, got {batch}")
        steps = len(origin) // batch

        def make(index: int, step: int) -> Batch:
            order = np.random.default_rng([seed, index // steps]).permutation(len(origin))
            return windows.batch(origin[order[step * batch : (step + 1) * batch][chosen]])

        identity = {"batch": batch, "seed": seed, "windows": len(origin), "digest": digest}
        super().__init__(make, steps, identity)


class HeldOutWindows(HeldOutBatches):
    """One pass over windows; the padding of the last batch has weight 0."""

    def __init__(
        self, windows: Windows, origin: Int[np.ndarray, " W"], *, batch: int, rows: RowNumbers = None
    ):
        chosen = chosen_rows(batch, rows)

        def make(step: int) -> Batch:
            numbers = step * batch + chosen
            return windows.batch(origin[np.minimum(numbers, len(origin) - 1)], numbers < len(origin))

        super().__init__(make, -(-len(origin) // batch), batch)


def naive_forecast(known: Float[np.ndarray, "B L C"], horizon: int, season: int = 1) -> np.ndarray:
    """(B, H, C): the last row repeated, or with a season (24 for a day of hourly rows) the last `season` rows.

    Raises:
      ValueError: fewer rows are known than a season has.
    """
    if not 1 <= season <= known.shape[1]:
        raise ValueError(f"season must be 1 to the {known.shape[1]} known rows, got {season}")
    last = known[:, -season:]
    return np.tile(last, (1, -(-horizon // season), 1))[:, :horizon]
