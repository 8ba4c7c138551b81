"""Trains an encoder to predict masked tokens of text: python -m train.mlm [PRESET] [OPTIONS].

Text and tokenizer are chosen as in train.lm. `python -m eval.mlm --workdir DIR` measures it.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.mlm import MLM

main = functools.partial(train_main, [MLM], name="train.mlm")

if __name__ == "__main__":
    start(main, "train.mlm")
