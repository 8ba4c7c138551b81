"""Trains a language model: python -m train.lm [PRESET] [OPTIONS].

Without arguments it trains a small BRL model on the sources of Python's standard library, in runs/stdlib. The same
command again resumes a run where it stopped (Ctrl-C and SIGTERM save first), bit for bit as if it had not stopped.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.lm import LM

main = functools.partial(train_main, [LM], name="train.lm")

if __name__ == "__main__":
    start(main, "train.lm")
