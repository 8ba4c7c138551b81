"""Trains a decoder to recall records from far back: python -m train.recall [PRESET] [OPTIONS].

docs/recall.md has the rows; `python -m eval.recall --workdir DIR` measures it at other lengths too.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.recall import RECALL

main = functools.partial(train_main, [RECALL], name="train.recall")

if __name__ == "__main__":
    start(main, "train.recall")
