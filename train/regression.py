"""Trains a decoder on in-context linear regression: python -m train.regression [PRESET] [OPTIONS].

docs/regression.md has the prompts; `python -m eval.regression --workdir DIR` compares it with least squares.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.regression import REGRESSION

main = functools.partial(train_main, [REGRESSION], name="train.regression")

if __name__ == "__main__":
    start(main, "train.regression")
