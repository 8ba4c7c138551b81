"""Trains a decoder on in-context linear regression: python -m train.regression [PRESET] [OPTIONS].

Every prompt is a new linear function and a few pairs (x, y) of it; the model predicts each y from the pairs before it
(Garg et al. 2022, arXiv:2208.01066; section 4 of arXiv:2509.07963). full-8, full-1, btt-8 and mlr-8 are full attention
with 8 heads and with 1, bilinear BTT and bilinear MLR attention with 8, at a size for two CPU cores. `python -m
eval.regression --workdir DIR` compares it with least squares.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.regression import REGRESSION

main = functools.partial(train_main, [REGRESSION], name="train.regression")

if __name__ == "__main__":
    start(main, "train.regression")
