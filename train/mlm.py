"""Trains an encoder to predict masked tokens of text: python -m train.mlm [PRESET] [OPTIONS].

Rows of --length tokens; --mask_share of them are asked for, other ones in every batch: 80% behind the mask, 10% as
another token, 10% as they are. Text and tokenizer are chosen as in train.lm. The documents of a row (--documents) see
no other where the mechanism can keep them apart (--pack). `python -m eval.mlm --workdir DIR` measures it.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.mlm import MLM

main = functools.partial(train_main, [MLM], name="train.mlm")

if __name__ == "__main__":
    start(main, "train.mlm")
