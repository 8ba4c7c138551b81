"""Trains an encoder-decoder to copy symbols, or on pairs of texts: python -m train.copy [PRESET] [OPTIONS].

docs/copy.md has the data; `python -m eval.copy --workdir DIR` measures what it writes by itself.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.copy import COPY

main = functools.partial(train_main, [COPY], name="train.copy")

if __name__ == "__main__":
    start(main, "train.copy")
