"""Pairs of a source and a target: symbols to copy, to reverse or to sort, and pairs of texts from files.

The symbols, or a tokenizer's tokens, are followed by two more: BEGIN, which starts a target's row, and END,
which the decoder predicts after the target's last token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from etils import epath

from brl_jax.fields import MOST, Checked, Count, Length, Range
from brl_jax.json_files import parse_json
from train.data.bucketed import EvalBatches, TrainBatches, default_buckets
from train.data.examples import Examples, examples_of
from train.data.files import numbered_lines, packed_or_not, parsed, shown
from train.data.tokenizers.base import CONFIG, Tokenizer
from train.data.tokenizers.named import check_tokenizer, load_tokenizer, train_tokenizer
from train.engine.batch import Batch
from train.engine.errors import UserError
from train.engine.fields import Free
from train.engine.metrics import log

Order = Literal["copy", "reverse", "sort"]

# Tokens beyond the symbols or the tokenizer's, and how many they are.
BEGIN, END, SPECIAL = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class CopyDataConfig(Checked):
    """The pairs."""

    order: Order = "copy"
    """The target: the source's symbols as they are, from the last to the first, or sorted."""
    vocabulary: Annotated[int, Range(2, MOST)] = 32
    """Number of symbols."""
    length: tuple[Length, ...] = (64,)
    """Symbols of the longest source of a batch; several lengths take turns from batch to batch. Of text, the longest
    source and target in tokens; further lengths are those to which shorter rows are padded."""
    min_length: Count = 1
    """Symbols of the shortest source; each row draws its own number between this and the batch's
    longest."""
    data_dir: str = ""
    """A folder of train.jsonl, valid.jsonl and test.jsonl (.gz too) with an object {"source": TEXT, "target": TEXT} in
    each line; empty: symbols, drawn as they are needed."""
    tokenizer: str = "bytes"
    """Of text: bytes, bpe:SIZE (learnt from the training text), words, words:MIN_COUNT, words:max=SIZE or the same with
    chars; or one that exists: a tokenizer.json, a SentencePiece .model, or hf:NAME of the Hugging Face hub."""
    valid_rows: Count = 128
    """Rows of each length in an evaluation while training."""
    test_rows: Free[Count] = 128
    """Rows of each length that eval.copy measures on."""

    def __post_init__(self):
        if not self.length:
            raise ValueError("length must be one or more numbers, got none")

    def without_effect(self) -> dict[str, str]:
        if self.data_dir:
            return dict.fromkeys(("order", "vocabulary", "min_length"), "with a data_dir")
        return {"tokenizer": "without a data_dir"}

    @property
    def cases(self) -> tuple[int, ...]:
        """The longest lengths of symbols, which take turns from batch to batch."""
        return self.length

    def draw(self, longest: int, seed: Sequence[int], rows: int) -> dict[str, np.ndarray]:
        """See `draw_pairs`."""
        return draw_pairs(self, longest, seed, rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest source."""
        return max(self.length)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths that rows of text are padded to; a target's row has BEGIN and END too."""
        lengths = self.length if len(self.length) > 1 else default_buckets(self.longest)
        return tuple(sorted({length + SPECIAL for length in lengths}))


def draw_pairs(config: CopyDataConfig, longest: int, seed: Sequence[int], rows: int) -> dict[str, np.ndarray]:
    """Pairs of symbols that depend on the configuration, the seed and the longest length alone.

    Returns:
      tokens: (R, T) int32, BEGIN and the target's symbols, T = longest + 1. source: (R, longest) int32.
      source_lengths: (R,) int32, from min_length to longest. targets: (R, T) int32, the target's symbols and END.
      weights: (R, T) float32, 1 where there is a target. What lies beyond a row's end is 0.
    """
    rng = np.random.default_rng([*seed, longest])
    lengths = rng.integers(min(config.min_length, longest), longest + 1, size=rows)
    symbols = rng.integers(config.vocabulary, size=(rows, longest))
    place = np.arange(longest)[None]
    exists = place < lengths[:, None]
    if config.order == "copy":
        target = symbols
    elif config.order == "reverse":
        target = np.take_along_axis(symbols, np.maximum(lengths[:, None] - 1 - place, 0), axis=1)
    else:
        target = np.sort(np.where(exists, symbols, config.vocabulary), axis=1)
    begin, end = config.vocabulary + BEGIN, config.vocabulary + END
    tokens, targets = (np.zeros((rows, longest + 1), np.int32) for _ in range(2))
    tokens[:, 0] = begin
    tokens[:, 1:] = targets[:, :-1] = np.where(exists, target, 0)
    targets[np.arange(rows), lengths] = end
    return {
        "tokens": tokens,
        "source": np.where(exists, symbols, 0).astype(np.int32),
        "source_lengths": lengths.astype(np.int32),
        "targets": targets,
        "weights": (np.arange(longest + 1)[None] <= lengths[:, None]).astype(np.float32),
    }


class TextPairs(NamedTuple):
    """Pairs of texts: their tokenizer, and the pairs of some splits, each with a source and a target with BEGIN and, if
    it is whole, END."""

    tokenizer: Tokenizer
    examples: Mapping[str, Examples]


class _Pair(NamedTuple):
    source: str
    target: str


def load_pairs(config: CopyDataConfig, workdir: str, splits: Sequence[str]) -> TextPairs:
    """The pairs of texts of some splits.

    The tokenizer of a run is learnt when it starts, and kept in its folder."""
    check_tokenizer(config.tokenizer)
    paths = {split: packed_or_not(Path(config.data_dir).expanduser() / f"{split}.jsonl") for split in splits}
    run = epath.Path(workdir)
    is_new = not (run / CONFIG).exists()
    if not is_new:
        tokenizer = load_tokenizer(run)
        if tokenizer.spec != config.tokenizer:
            raise UserError(
                f"--tokenizer: the run in {run} was started with {tokenizer.spec!r}, got {config.tokenizer!r}; "
                "expected the same, or another --workdir"
            )
    elif "train" in splits:
        texts = [text for _, line in _lines(paths["train"]) for text in line]
        tokenizer = train_tokenizer(config.tokenizer, lambda: (f"{text}\n".encode() for text in texts))
    else:
        raise UserError(f"--workdir: no tokenizer in {run}; expected the folder of a run")
    found = {split: _examples(config, path, split, tokenizer) for split, path in paths.items()}
    if is_new:
        tokenizer.save(run)
    return TextPairs(tokenizer, found)


def _parse(line: bytes) -> _Pair:
    """The pair of a line."""
    values = parse_json(line, dict.fromkeys(_Pair._fields, str))
    pair = _Pair(values["source"], values["target"])
    for name, text in zip(_Pair._fields, pair):
        if not text.strip():
            raise ValueError(f'expected a text "{name}", got an empty one: {shown(line)}')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f'expected Unicode in "{name}", got half a surrogate pair: {shown(line)}'
            ) from error
    return pair


def _lines(path: Path) -> list[tuple[int, _Pair]]:
    """The pairs of a file, with the numbers of their lines."""
    numbered = list(numbered_lines(path))
    pairs = list(zip((number for number, _ in numbered), parsed(path, numbered, _parse)))
    if not pairs:
        raise UserError(f"--data_dir: expected pairs in {path}, got none")
    return pairs


def _examples(config: CopyDataConfig, path: Path, split: str, tokenizer: Tokenizer) -> Examples:
    """The pairs of a file in tokens, cut to the longest length."""
    begin, end = tokenizer.vocab_size + BEGIN, tokenizer.vocab_size + END
    pieces: list[np.ndarray] = []
    truncated = 0
    for number, pair in _lines(path):
        sides = []
        for name, text in zip(_Pair._fields, pair):
            try:
                tokens = np.asarray(tokenizer.encode_example(text), np.int32)
            except UserError as error:
                raise UserError(f"--data_dir: {path}, line {number}: {error}") from error
            if not len(tokens):
                raise UserError(f'--data_dir: {path}, line {number}: "{name}" has no tokens: {text[:40]!r}')
            sides.append(tokens)
        source, target = sides
        truncated += sum(len(side) > config.longest for side in sides)
        last = [end] if len(target) <= config.longest else []
        pieces += [
            source[: config.longest],
            np.array([begin, *target[: config.longest].tolist(), *last], np.int32),
        ]
    if truncated:
        log(f"{split}: {truncated} of {len(pieces)} texts were longer than {config.longest} tokens: cut")
    return examples_of(pieces, [0] * (len(pieces) // 2), 2, truncated)


def _to_pairs(batch: Batch) -> Batch:
    """A batch of `train.data.lra` as one of `draw_pairs`."""
    (source, rows), lengths = np.moveaxis(batch["tokens"], 1, 0), batch["lengths"]
    places = np.arange(rows.shape[1] - 1)[None]
    arrays = {
        "tokens": rows[:, :-1],
        "source": source,
        "source_lengths": lengths[:, 0],
        "targets": rows[:, 1:],
        "weights": (places < lengths[:, 1:] - 1).astype(np.float32) * batch["weights"][:, None],
    }
    return Batch(arrays, batch.reset)


class PairStream(TrainBatches):
    """Endless training batches of pairs of texts, padded to their bucket; see `TrainBatches` and `draw_pairs`."""

    def __next__(self) -> Batch:
        return _to_pairs(super().__next__())


class HeldOutPairs(EvalBatches):
    """One pass over a split's pairs of texts; see `EvalBatches` and `draw_pairs`."""

    def __iter__(self):
        return map(_to_pairs, super().__iter__())
