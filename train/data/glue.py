"""The tasks of GLUE (Wang et al. 2018, arXiv:1804.07461) as tokens: from its tsv files, TensorFlow Datasets or Hugging
Face.

A row is the sentence, or both sentences with a separator between them. The test splits of GLUE have no public labels
(except MRPC's): what GLUE calls dev is the test split here, and every tenth training example is for validation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from brl_jax.attention.core.checks import check_choice
from brl_jax.fields import Checked, Natural, Range
from train.data.examples import Examples, examples_of
from train.data.files import belongs, numbered_lines, packed_or_not, parsed, shown
from train.data.named_sources import load_hf, open_tfds
from train.data.tokenizers.base import Tokenizer
from train.engine.errors import UserError
from train.engine.fields import Decided
from train.engine.metrics import log

# A score of STS-B, from 0 to the largest, becomes a whole number.
SCORE_STEPS = 1000
LARGEST_SCORE = 5.0

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]


class GlueTask(NamedTuple):
    """One task.

    Attributes:
      folder: of its tsv files. columns: of the sentences, there. label: the column of the label, there.
      fields: of the sentences in TensorFlow Datasets and Hugging Face, where the label is called "label".
      classes: the names of the labels, "0" and "1" where they are numbers; none where the label is a score.
      metrics: the task's own, the first one the main one. examples: how many there are for training.
      tests: the names of the splits that have public labels and are not for training.
      header: whether the files name their columns in the first line; columns are numbers where they don't.
      has_gaps: whether the published files have lines without some columns, which are left out as TensorFlow Datasets
        and Hugging Face leave them out, and empty sentences, which are kept as they keep them.
    """

    folder: str
    columns: tuple[str, ...]
    label: str
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    metrics: tuple[Metric, ...]
    examples: int
    tests: tuple[str, ...] = ("dev",)
    header: bool = True
    has_gaps: bool = False


_YES_NO = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_PAIR = ("sentence1", "sentence2")
_QUESTIONS = ("question1", "question2")

GLUE_TASKS: Mapping[str, GlueTask] = {
    "cola": GlueTask("CoLA", ("3",), "1", ("sentence",), _YES_NO, ("matthews",), 8_551, header=False),
    "sst2": GlueTask("SST-2", ("sentence",), "label", ("sentence",), _YES_NO, ("accuracy",), 67_349),
    "mrpc": GlueTask(
        "MRPC", ("#1 String", "#2 String"), "Quality", _PAIR, _YES_NO, ("f1", "accuracy"), 3_668
    ),
    "qqp": GlueTask(
        "QQP", _QUESTIONS, "is_duplicate", _QUESTIONS, _YES_NO, ("accuracy", "f1"), 363_846, has_gaps=True
    ),
    "stsb": GlueTask("STS-B", _PAIR, "score", _PAIR, (), ("pearson", "spearman"), 5_749),
    "mnli": GlueTask(
        "MNLI",
        _PAIR,
        "gold_label",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        ("accuracy",),
        392_702,
        ("dev_matched", "dev_mismatched"),
    ),
    "qnli": GlueTask(
        "QNLI",
        ("question", "sentence"),
        "label",
        ("question", "sentence"),
        _ENTAILMENT,
        ("accuracy",),
        104_743,
    ),
    "rte": GlueTask("RTE", _PAIR, "label", _PAIR, _ENTAILMENT, ("accuracy",), 2_490),
}


class Row(NamedTuple):
    """The sentences of an example, and its class or its score in thousandths."""

    sentences: tuple[str, ...]
    target: int


@dataclasses.dataclass(frozen=True)
class GlueDataConfig(Checked):
    """The examples."""

    # The preset's: its other settings are for this task.
    task: Decided[str] = "cola"
    data_dir: str = "tfds"
    """A folder with the task's folder of tsv files (CoLA, SST-2, ...), or that folder itself; tfds or hf for the task
    in TensorFlow Datasets (glue/TASK) or Hugging Face (nyu-mll/glue)."""
    length: Annotated[int, Range(8, 2**27)] = 128
    """Tokens of a row; where two sentences are longer, the longer one is cut first."""
    train_examples: Natural = 0
    """Training examples, the first ones; 0: all."""

    def __post_init__(self):
        check_choice("task", self.task, tuple(GLUE_TASKS))


def load_glue(
    config: GlueDataConfig, tokenizer: Tokenizer, separator: int, splits: Sequence[str]
) -> dict[str, Examples]:
    """The examples of some of the splits train, valid, test and the task's own test splits ("dev_mismatched")."""
    task = GLUE_TASKS[config.task]
    read = _reader(config, task)
    found: dict[str, Examples] = {}
    for split in splits:
        source = "train" if split in ("train", "valid") else task.tests[0] if split == "test" else split
        rows = read(source)
        if source == "train":
            rows = (row for number, row in enumerate(rows) if belongs(number, split))
        limit = config.train_examples if split == "train" else 0
        found[split] = _examples(rows, tokenizer, separator, config, limit)
        if not len(found[split]):
            raise UserError(f"--data_dir: {config.data_dir} has no {split} examples of {config.task}")
    return found


def _reader(config: GlueDataConfig, task: GlueTask) -> Callable[[str], Iterator[Row]]:
    """split -> its rows; the splits are named as GLUE names its files."""
    if config.data_dir in ("tfds", "hf"):
        if config.data_dir == "tfds":
            tables = open_tfds(f"--data_dir tfds (glue/{config.task})", f"glue/{config.task}")
        else:
            tables = load_hf(f"--data_dir hf: nyu-mll/glue, {config.task}", f"nyu-mll/glue:{config.task}")
        return functools.partial(_table_rows, tables, task)
    folder = Path(config.data_dir).expanduser()
    if (folder / task.folder).is_dir() or not any(folder.glob("*.tsv*")):
        folder /= task.folder
    return functools.partial(_file_rows, folder, task)


def _table_rows(tables: Mapping[str, Any], task: GlueTask, split: str) -> Iterator[Row]:
    name = split.replace("dev", "validation")
    if name not in tables:
        raise UserError(f"--data_dir: expected a split {name}, got {', '.join(map(str, tables))}")
    for row in tables[name]:
        texts = (row[field] for field in task.fields)
        sentences = tuple(text.decode() if isinstance(text, bytes) else text for text in texts)
        yield Row(sentences, int(row["label"]) if task.classes else _score(str(row["label"])))


def _file_rows(folder: Path, task: GlueTask, split: str) -> Iterator[Row]:
    path = packed_or_not(folder / f"{split}.tsv")
    lines = numbered_lines(path)
    wanted = (*task.columns, task.label)
    if task.header:
        first = next(lines, None)
        names = [] if first is None else first[1].decode("utf-8-sig", errors="replace").split("\t")
        missing = [name for name in wanted if name not in names]
        if missing:
            shown = ", ".join(map(repr, names)) or "an empty file"
            raise UserError(f"--data_dir: {path}, line 1: expected a column {missing[0]!r}, got {shown}")
        places = [names.index(name) for name in wanted]
    else:
        places = [int(name) for name in wanted]
    left_out = 0
    for row in parsed(path, lines, functools.partial(_parse, task, places)):
        if row is None:
            left_out += 1
        else:
            yield row
    if left_out:
        log(f"{path}: lines left out, as they lack a sentence or a label: {left_out}")


def _parse(task: GlueTask, places: Sequence[int], line: bytes) -> Row | None:
    """The example of a line, whose fields are not quoted; None for one that lacks columns where the task has gaps."""
    try:
        fields = line.decode().split("\t")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {shown(line)}") from error
    if len(fields) <= max(places):
        if task.has_gaps:
            return None
        raise ValueError(f"expected at least {max(places) + 1} columns, got {len(fields)}: {shown(line)}")
    *sentences, label = (fields[place] for place in places)
    if not (task.has_gaps or all(sentence.strip() for sentence in sentences)):
        raise ValueError(f"expected a sentence, got an empty one: {shown(line)}")
    if not task.classes:
        return Row(tuple(sentences), _score(label))
    if label not in task.classes:
        raise ValueError(f"expected the label {' or '.join(task.classes)}, got {label!r}")
    return Row(tuple(sentences), task.classes.index(label))


def _score(text: str) -> int:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0.0 <= score <= LARGEST_SCORE:
        raise ValueError(f"expected a score from 0 to {LARGEST_SCORE:g}, got {text!r}")
    return round(score * SCORE_STEPS)


def join_sentences(sentences: Sequence[np.ndarray], length: int, separator: int) -> np.ndarray:
    """The tokens of one sentence, or of two with a separator between them, at most `length` of them: the longer of two
    is cut first."""
    if len(sentences) == 1:
        return sentences[0][:length]
    first, second = sentences
    room = length - 1
    first = first[: max(room - len(second), room - room // 2)]
    return np.concatenate([first, [separator], second[: room - len(first)]])


def _examples(
    rows: Iterator[Row], tokenizer: Tokenizer, separator: int, config: GlueDataConfig, limit: int
) -> Examples:
    pieces, targets, truncated = [], [], 0
    for row in rows:
        sentences = [np.asarray(tokenizer.encode_example(sentence), np.int32) for sentence in row.sentences]
        tokens = join_sentences(sentences, config.length, separator).astype(np.int32)
        truncated += len(tokens) < sum(map(len, sentences)) + len(sentences) - 1
        pieces.append(tokens if len(tokens) else np.array([separator], np.int32))
        targets.append(row.target)
        if len(targets) == limit:
            break
    return examples_of(pieces, targets, 1, truncated)
