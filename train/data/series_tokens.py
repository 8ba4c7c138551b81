"""A series as tokens, as in Chronos (Ansari et al. 2024, arXiv:2403.07815, section 3.1): divided by the mean absolute
value of its known rows, then quantised in bins of equal width."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int

from brl_jax.fields import MOST, Positive, Range
from train.data.series import Series, SeriesConfig
from train.engine.batch import Batch


@dataclasses.dataclass(frozen=True)
class TokenSeriesConfig(SeriesConfig):
    """The series, its windows and its tokens; each of several columns is a separate series."""

    bins: Annotated[int, Range(2, MOST)] = 512
    """Number of tokens, which are bins of equal width."""
    limit: Positive = 8.0
    """The bins span -limit to limit times the mean absolute value of the known rows; larger values go to the
    outermost."""


def scale_of(known: Float[np.ndarray, "*B L"]) -> Float[np.ndarray, "*B 1"]:
    """The mean absolute value of numbers; 1 if all are 0."""
    size = np.abs(known).mean(axis=-1, keepdims=True)
    return np.where(size > 0, size, 1.0)


def to_tokens(scaled: Float[np.ndarray, "*B T"], config: TokenSeriesConfig) -> Int[np.ndarray, "*B T"]:
    """The bin whose centre is nearest; the first and the last bin's centres are -limit and limit."""
    place = (scaled / config.limit + 1) / 2 * (config.bins - 1)
    return np.clip(np.round(place), 0, config.bins - 1).astype(np.int32)


def to_numbers(tokens: Int[np.ndarray, "*B T"], config: TokenSeriesConfig) -> Float[np.ndarray, "*B T"]:
    """The centres of bins."""
    return (tokens / (config.bins - 1) * 2 - 1) * config.limit


class TokenWindows:
    """Batches of windows of single columns; origin o is row o // C and column o % C of C columns.

    A batch is what `train.tasks.copy.copy_objective` reads: the source has the L known tokens, the target the H that
    follow. The first token of "tokens" is the one after the bins.
    """

    def __init__(self, series: Series, config: TokenSeriesConfig):
        self.config = config
        self._values = series.values
        self._places = np.arange(-config.lookback, config.horizon)

    def known(self, origin: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, "B L"], Float[np.ndarray, "B 1"]]:
        """The known tokens, and the scale by which their numbers were divided."""
        numbers = self._numbers(origin)[:, : self.config.lookback]
        scale = scale_of(numbers)
        return to_tokens(numbers / scale, self.config), scale

    def _numbers(self, origin: Int[np.ndarray, " B"]) -> Float[np.ndarray, "B T"]:
        columns = self._values.shape[1]
        return self._values[(origin // columns)[:, None] + self._places, (origin % columns)[:, None]]

    def batch(self, origin: Int[np.ndarray, " B"], exists: Any = True) -> Batch:
        c, numbers = self.config, self._numbers(origin)
        tokens = to_tokens(numbers / scale_of(numbers[:, : c.lookback]), c)
        source, targets = np.split(tokens, [c.lookback], axis=1)
        there = np.broadcast_to(exists, origin.shape)[:, None]
        arrays = {
            "tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=c.bins),
            "source": source,
            "source_lengths": np.full(len(source), c.lookback, np.int32),
            "targets": targets,
            "weights": np.broadcast_to(there, targets.shape).astype(np.float32),
        }
        return Batch(arrays, reset=np.True_)


def column_origins(origin: Int[np.ndarray, " W"], columns: int) -> Int[np.ndarray, " WC"]:
    """Origins of `TokenWindows` for every column, from the rows at which windows begin to forecast."""
    return (origin[:, None] * columns + np.arange(columns)).reshape(-1)
