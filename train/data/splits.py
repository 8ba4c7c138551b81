"""What a source of text is: its splits, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from train.engine.errors import UserError

SPLITS = ("train", "valid", "test")
# The words by which data sets and files name them.
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}


@dataclasses.dataclass(frozen=True)
class Split:
    """The text of one split: `blocks()` reads it from the start; `size` is its bytes where known.

    A block has bytes of one document; the first one of each is a `DocumentStart`.
    """

    blocks: Callable[[], Iterator[bytes]]
    size: int | None


@dataclasses.dataclass(frozen=True)
class Source:
    """The splits of a text, by name, and a fingerprint that changes when the text does.

    readers: by address, what opens each of its files, if it is made of files. holds_out: whether `holdout` decides what
    is held out; otherwise the text has validation text.
    """

    fingerprint: str
    splits: Mapping[str, Split]
    readers: Mapping[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    holds_out: bool = False


def present(splits: Sequence[str], there: Collection[str], data: str) -> list[str]:
    """The requested splits of what --data names, without test if others are requested too and there is none.

    Raises:
      UserError: another one is missing.
    """
    missing = [split for split in splits if split not in there and (split != "test" or len(splits) == 1)]
    if missing:
        raise UserError(f"--data: {data} has no {missing[0]} text, only {', '.join(there)}")
    return [split for split in splits if split in there]
