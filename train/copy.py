"""Trains an encoder-decoder to copy: python -m train.copy [PRESET] [OPTIONS].

Sources of symbols that the target repeats (--order copy), from the last to the first (reverse) or sorted (sort), drawn
for each step; or pairs of texts, a translation or a summary each: --data_dir names a folder of train.jsonl, valid.jsonl
and test.jsonl. Any causal mechanism in the decoder and any bidirectional one in the encoder (--encoder_mechanism).
`python -m eval.copy --workdir DIR` measures what it writes by itself, at other lengths too.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.copy import COPY

main = functools.partial(train_main, [COPY], name="train.copy")

if __name__ == "__main__":
    start(main, "train.copy")
