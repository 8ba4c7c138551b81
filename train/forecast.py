"""Trains a forecaster of time series: python -m train.forecast [PRESET] --data FILE [OPTIONS].

encoder   predicts all rows of the horizon at once
tokens    writes one column's values as tokens (Chronos, arXiv:2403.07815)

docs/forecast.md has the data and the options; `python -m eval.forecast --workdir DIR` measures the test split.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.forecast import FORECAST_TASKS

main = functools.partial(train_main, FORECAST_TASKS, name="train.forecast")

if __name__ == "__main__":
    start(main, "train.forecast")
