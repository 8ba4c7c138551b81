"""ListOps: nested MIN, MAX, MED and SM (sum modulo 10) of digits, generated and read as the Long Range Arena's.

Nangia & Bowman 2018 (arXiv:1804.06028) with the lengths of Tay et al. 2020 (arXiv:2011.04006, section 3.2.1): a
tree whose nodes down to `max_depth` are operators with probability 1/4, with 2 to `max_args` arguments each, and
digits otherwise; kept if it has more than `min_tokens` and fewer than `max_tokens` tokens. The median of an even
number of values is the mean of the middle two, rounded down.

A tree is a branching process: whole levels of many trees are drawn at a time, and the levels' arrays give lengths,
values (bottom up) and places of the tokens (top down) without walking a single tree.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from jaxtyping import Int, Int8, UInt8

from brl_jax.fields import Checked, Natural, Range
from train.data.examples import Source, digest
from train.data.files import file_stats, numbered_lines, parsed, shown, split_files, writing_folder
from train.data.lra.workers import in_processes
from train.engine.errors import UserError

NUM_CLASSES = 10
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = 10 + len(OPERATORS)
"""Tokens: the digits 0-9, the operators 10-13, the closing bracket."""
VOCAB_SIZE = END + 1
MAX_ARGS = 64

_HEADER = b"Source\tTarget"
_SPLIT_FILES = {"train": "basic_train.tsv", "valid": "basic_val.tsv", "test": "basic_test.tsv"}
_OPERATOR_SHARE = 0.25
_TREES_AT_ONCE = 512
# The number of rounds without a tree of the wanted length after which generation gives up.
_PATIENCE = 200
# Expressions of a chunk, two seconds of work: with fewer a process does not pay. The examples of a seed depend on it.
_CHUNK = 10_000


@dataclasses.dataclass(frozen=True)
class ListOpsSpec(Checked):
    """Which trees are generated."""

    min_tokens: Natural = 500
    """Expressions have more tokens than this (operators, digits and closing brackets)."""
    max_tokens: int = 2000
    """And fewer than this."""
    max_depth: Annotated[int, Range(2, 1000)] = 10
    """Deepest level of a digit; operators stand above it."""
    max_args: Annotated[int, Range(2, MAX_ARGS)] = 10
    """Most arguments of an operator."""

    def __post_init__(self):
        if self.min_tokens >= self.max_tokens - 1:
            raise ValueError(
                f"min_tokens must be 0 to max_tokens - 2 = {self.max_tokens - 2}, got {self.min_tokens}"
            )


class Trees(NamedTuple):
    """Expressions, one after the other.

    tokens: (total,) uint8. arities: (total,) int8, arguments of the operators, -1 where a tree ends, 0 elsewhere.
    lengths: (n,) tokens of each. labels: (n,) values.
    """

    tokens: UInt8[np.ndarray, " total"]
    arities: Int8[np.ndarray, " total"]
    lengths: Int[np.ndarray, " n"]
    labels: Int[np.ndarray, " n"]


class _Level(NamedTuple):
    """The nodes of one level of many trees: the tree (n,) of each and its number of arguments (n,), 0 for digits.
    Arguments are in the next level, in the order of their operators."""

    tree: Int[np.ndarray, " n"]
    arity: Int[np.ndarray, " n"]


def generate_trees(rng: np.random.Generator, count: int, spec: ListOpsSpec) -> Trees:
    """`count` expressions of the specification."""
    batches: list[Trees] = []
    found, fruitless = 0, 0
    while found < count:
        levels = _accept(_draw_levels(rng, spec), spec)
        size = 0 if levels is None else int(levels[0].tree.size)
        fruitless = 0 if size else fruitless + 1
        if fruitless > _PATIENCE:
            raise UserError(
                f"--min_tokens, --max_tokens: no expression of {spec.min_tokens + 1} to {spec.max_tokens - 1} tokens "
                f"among {_PATIENCE * _TREES_AT_ONCE} of depth {spec.max_depth} with up to {spec.max_args} arguments"
            )
        if levels is not None:
            batches.append(_write_out(rng, levels))
            found += size
    tokens, arities, lengths, labels = map(np.concatenate, zip(*batches))
    total = int(lengths[:count].sum())
    return Trees(tokens[:total], arities[:total], lengths[:count], labels[:count])


def _draw_levels(rng: np.random.Generator, spec: ListOpsSpec) -> list[_Level]:
    """The shapes of trees whose root is an operator (a digit alone would be too short anyway)."""
    tree = np.arange(_TREES_AT_ONCE)
    operator = np.ones(len(tree), bool)
    levels = []
    for depth in range(1, spec.max_depth + 1):
        if depth > 1:
            operator = (
                rng.random(len(tree)) < _OPERATOR_SHARE
                if depth < spec.max_depth
                else np.zeros(len(tree), bool)
            )
        arity = np.where(operator, rng.integers(2, spec.max_args + 1, len(tree)), 0)
        levels.append(_Level(tree, arity))
        tree = np.repeat(tree, arity)
    return levels


def _accept(levels: list[_Level], spec: ListOpsSpec) -> list[_Level] | None:
    """The trees of the wanted length, renumbered; None if no tree has it."""
    tokens = np.zeros(_TREES_AT_ONCE, np.int64)
    for level in levels:
        # An operator has a closing bracket too.
        tokens += np.bincount(level.tree, 1 + (level.arity > 0), _TREES_AT_ONCE).astype(np.int64)
    good = (tokens > spec.min_tokens) & (tokens < spec.max_tokens)
    if not good.any():
        return None
    number = np.cumsum(good) - 1
    kept = [good[level.tree] for level in levels]
    return [_Level(number[level.tree[k]], level.arity[k]) for level, k in zip(levels, kept)]


def _write_out(rng: np.random.Generator, levels: list[_Level]) -> Trees:
    """Draws digits and operators, computes the values bottom up and places the tokens top down."""
    operators = [rng.integers(len(OPERATORS), size=level.tree.size) for level in levels]
    values = [rng.integers(10, size=level.tree.size) for level in levels]
    digits = [value.copy() for value in values]
    sizes = [np.ones(level.tree.size, np.int64) for level in levels]
    for i in range(len(levels) - 2, -1, -1):
        at = np.flatnonzero(levels[i].arity)
        if len(at):
            arity = levels[i].arity[at]
            starts = np.cumsum(arity) - arity
            values[i][at] = _evaluate(operators[i][at], values[i + 1], starts, arity)
            sizes[i][at] = 2 + np.add.reduceat(sizes[i + 1], starts)

    tokens = np.zeros(sizes[0].sum(), np.uint8)
    arities = np.zeros(len(tokens), np.int8)
    places = np.cumsum(sizes[0]) - sizes[0]
    arities[places + sizes[0] - 1] = -1
    for i, level in enumerate(levels):
        inner = level.arity > 0
        tokens[places] = np.where(inner, 10 + operators[i], digits[i])
        arities[places[inner]] = level.arity[inner]
        tokens[places[inner] + sizes[i][inner] - 1] = END
        if inner.any():
            arity = level.arity[inner]
            before = np.cumsum(sizes[i + 1]) - sizes[i + 1]
            first = np.repeat(before[np.cumsum(arity) - arity], arity)
            places = np.repeat(places[inner] + 1, arity) + before - first
        else:
            break
    return Trees(tokens, arities, sizes[0], values[0])


def _evaluate(operators, values, starts, arity):
    """Values of operators whose arguments are values[starts : starts + arity]; all (k,) but `values`."""
    owner = np.repeat(np.arange(len(starts)), arity)
    ordered = values[np.lexsort((values, owner))]
    median = (ordered[starts + (arity - 1) // 2] + ordered[starts + arity // 2]) // 2
    choices = [ordered[starts], ordered[starts + arity - 1], median, np.add.reduceat(values, starts) % 10]
    return np.choose(operators, choices)


def _chunk(spec: ListOpsSpec, seed: int, split: int, index: int, count: int) -> Trees:
    return generate_trees(np.random.default_rng([seed, split, index]), count, spec)


def generated(
    spec: ListOpsSpec, seed: int, sizes: dict[str, int], processes: int
) -> dict[str, Callable[[], Iterator[Trees]]]:
    """The splits of a generated set, each the same for any number of processes."""
    return in_processes(functools.partial(_chunk, spec, seed), sizes, _CHUNK, processes, "listops")


def generated_source(spec: ListOpsSpec, seed: int, sizes: dict[str, int], processes: int) -> Source:
    """Expressions generated while they are read."""

    def read(chunks: Callable[[], Iterator[Trees]]) -> Iterator[tuple[bytes, int]]:
        for trees in chunks():
            expressions = np.split(trees.tokens, np.cumsum(trees.lengths)[:-1])
            yield from zip(map(np.ndarray.tobytes, expressions), trees.labels.tolist())

    splits = generated(spec, seed, sizes, processes)
    return Source(
        "generated listops",
        digest("listops", dataclasses.asdict(spec), seed, sizes),
        {name: functools.partial(read, chunks) for name, chunks in splits.items()},
    )


# --- files ---


# The release writes trees of pairs: (((op a1) a2) ]), a bracket for each argument and for the end.
_TEXT = [
    *(f"{digit} )" for digit in range(10)),
    *("( " * (arity + 1) + name for name in OPERATORS for arity in range(MAX_ARGS + 1)),
    "] ) )",
    "] )",
]


def _texts(trees: Trees) -> Iterator[bytes]:
    """Each expression as the release writes it."""
    tokens, arities = trees.tokens.astype(np.int64), trees.arities
    inner = (tokens >= 10) & (tokens < END)
    codes = np.where(inner, 10 + (tokens - 10) * (MAX_ARGS + 1) + arities, tokens)
    codes = np.where(tokens == END, len(_TEXT) - 2 + (arities < 0), codes)
    stop = 0
    for length in trees.lengths.tolist():
        start, stop = stop, stop + length
        yield " ".join([_TEXT[code] for code in codes[start:stop].tolist()]).encode()


def write_release(
    out: str | os.PathLike[str], spec: ListOpsSpec, seed: int, sizes: dict[str, int], processes: int
) -> None:
    """Writes basic_{train,val,test}.tsv as the Long Range Arena's release has them; the folder is whole or does not
    exist.
    """
    with writing_folder(out) as folder:
        for split, chunks in generated(spec, seed, sizes, processes).items():
            with open(folder / _SPLIT_FILES[split], "wb") as file:
                file.write(_HEADER + b"\n")
                for trees in chunks():
                    lines = (b"%b\t%d\n" % pair for pair in zip(_texts(trees), trees.labels.tolist()))
                    file.write(b"".join(lines))


_BYTES = {name.encode(): bytes([ord("a") + i]) for i, name in enumerate(OPERATORS)}
_TOKEN_OF = np.full(256, 255, np.uint8)
_TOKEN_OF[ord("0") : ord("9") + 1] = np.arange(10)
_TOKEN_OF[ord("a") : ord("a") + len(OPERATORS)] = np.arange(10, END)
_TOKEN_OF[ord("]")] = END


def _parse(line: bytes) -> tuple[bytes, int]:
    """Tokens and label of one line of a .tsv file; raises ValueError if it is malformed."""
    columns = line.split(b"\t")
    if len(columns) != 2:
        raise ValueError(f"expected 2 columns (Source, Target), got {len(columns)}")
    source, target = columns
    if not (target.isdigit() and int(target) < NUM_CLASSES):
        raise ValueError(f"expected a value of 0 to 9, got {shown(target)}")
    packed = source.translate(None, b"() ")
    for name, letter in _BYTES.items():
        packed = packed.replace(name, letter)
    tokens = _TOKEN_OF[np.frombuffer(packed, np.uint8)] if packed else np.zeros(0, np.uint8)
    if not len(tokens) or tokens.max() == 255:
        raise ValueError(f"expected an expression of MIN, MAX, MED and SM, got {shown(source)}")
    if (tokens == END).sum() != ((tokens >= 10) & (tokens < END)).sum():
        raise ValueError("the expression's brackets are not balanced; a truncated file?")
    return tokens.tobytes(), int(target)


def _read(path: Path) -> Iterator[tuple[bytes, int]]:
    lines = numbered_lines(path)
    header = next(lines, (1, b""))[1]
    if header != _HEADER:
        raise UserError(f"--data_dir: {path}, line 1: expected Source and Target, got {shown(header)}")
    yield from parsed(path, lines, _parse)


def open_files(folder: Path) -> Source | None:
    """The release's basic_{train,val,test}.tsv (or .tsv.gz), in the folder or its listops-1000; None if there are
    none.
    """
    for place in (folder, folder / "listops-1000"):
        paths = split_files(place, _SPLIT_FILES)
        if paths is not None:
            stats = file_stats(paths.values())
            splits = {split: functools.partial(_read, path) for split, path in paths.items()}
            return Source(f"listops of {place}", digest("listops files", stats), splits)
    return None
