"""Trains a forecaster of time series: python -m train.forecast [PRESET] --data FILE [OPTIONS].

encoder   reads `--lookback` rows and `--horizon` empty ones, and predicts the values of the empty ones at once;
          any listed mechanism that has a bidirectional form
tokens    an encoder-decoder of one column's values as tokens (Chronos, arXiv:2403.07815), whose forecasts are sampled;
          any listed mechanism that has both forms. tokens-kernels and chronos-tiny take series of random kernels

FILE is a table such as ETTh1.csv (a first column "date"; train/data/series.py says how it is split and normalised).
--features multivariate forecasts all columns, otherwise --target alone. `python -m eval.forecast --workdir DIR`
measures it on the test split, with naive forecasts for comparison.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.forecast import FORECAST_TASKS

main = functools.partial(train_main, FORECAST_TASKS, name="train.forecast")

if __name__ == "__main__":
    start(main, "train.forecast")
