"""Trains a decoder to recall records from far back: python -m train.recall [PRESET] [OPTIONS].

Multi-query associative recall (Zoology, arXiv:2312.04927), induction heads (arXiv:2312.00752) and selective copying
(arXiv:2402.01032), with any causal mechanism; --kind, --length, --pairs, --gap and --vocabulary size the rows, which
are drawn for each step. `python -m eval.recall --workdir DIR` measures it at other lengths too.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.recall import RECALL

main = functools.partial(train_main, [RECALL], name="train.recall")

if __name__ == "__main__":
    start(main, "train.recall")
