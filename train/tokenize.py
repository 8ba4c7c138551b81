"""Writes a text's tokens as ArrayRecord shards: python -m train.tokenize --data TEXT --tokenizer NAME --out DIR.

`train.lm --data tokens:DIR` trains on them. The same command again writes the shards that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from train.cli.command import start
from train.cli.options import parse_options
from train.data.write_shards import TokenizeOptions, write_shards


def main(argv: Sequence[str]) -> None:
    """Writes the shards; see the module's text and --help."""
    about = "Writes a text's tokens as ArrayRecord shards."
    write_shards(parse_options(TokenizeOptions(), argv, prog="python -m train.tokenize", about=about))


if __name__ == "__main__":
    start(main, "train.tokenize")
