"""Text from data sets by name: TensorFlow Datasets and Hugging Face datasets."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.data.splits import SPLIT_NAMES, SPLITS, Source, Split
from train.data.tokenizers.pieces import DocumentStart
from train.engine.errors import UserError
from train.engine.storage import digest

_ROWS = 256
_STRINGS = ("string", "large_string", "string_view")


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Turns what a library raises (about the network, the hub, a parser, files) into one line."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{option}: {first_line}") from error


def document_blocks(texts: Iterable[str | bytes | None]) -> Iterator[DocumentStart]:
    """A block for each document, which ends with a line end."""
    for text in texts:
        content = text.encode() if isinstance(text, str) else (text or b"")
        yield DocumentStart(content if content.endswith(b"\n") else content + b"\n")


def text_field(option: str, fields: Sequence[str], asked: str | None, others: Sequence[str] = ()) -> str:
    """The field that holds the text: the requested one, else `text`, else the only one that ends in _text, or the only
    one.
    """
    if (asked or "text") in others:
        raise UserError(f"{option}: the field {asked or 'text'!r} holds something other than strings")
    if asked:
        if asked not in fields:
            raise UserError(
                f"{option}: no text field {asked!r}, the data set has {', '.join(fields) or 'none'}"
            )
        return asked
    if "text" in fields:
        return "text"
    candidates = [f for f in fields if f.endswith("_text")] or list(fields)
    if len(candidates) != 1:
        raise UserError(f"{option}: cannot tell which field is the text among {', '.join(fields) or 'none'}")
    return candidates[0]


def source_of_rows(
    fingerprint: str,
    option: str,
    rows: Mapping[str, int],
    blocks: Callable[[str, int, int], Iterator[bytes]],
    holdout: float,
) -> Source:
    """Splits by the data set's own names; without a validation split, the last share of the training rows is used."""
    named: dict[str, str] = {}
    for name in rows:
        if name in SPLIT_NAMES:
            named.setdefault(SPLIT_NAMES[name], name)
    if not named:
        raise UserError(f"{option}: expected a split named train, got {', '.join(rows) or 'no split at all'}")
    bounds = {split: (name, 0, rows[name]) for split, name in named.items()}
    holds_out = "valid" not in bounds
    if "train" in bounds and holds_out:
        name, _, count = bounds["train"]
        if count < 2:
            raise UserError(
                f"{option}: split {name!r} has {count} rows, too few to train and hold out a share"
            )
        cut = count - min(max(round(count * holdout), 1), count - 1)
        bounds["train"], bounds["valid"] = (name, 0, cut), (name, cut, count)
    splits = {s: Split(functools.partial(blocks, *bounds[s]), None) for s in SPLITS if s in bounds}
    return Source(fingerprint, splits, holds_out=holds_out)


def open_tfds(option: str, name: str) -> Mapping[str, Any]:
    """The splits of a data set of TensorFlow Datasets, rows by number."""
    try:
        import tensorflow_datasets as tfds

        importlib.import_module("tensorflow_datasets.text")  # registers wiki40b and its like
        with naming(option):
            sources: dict[str, Any] = tfds.data_source(name)
    except ModuleNotFoundError as error:
        if "'tensorflow'" in str(error):
            raise UserError(
                f"{option}: not prepared on this machine, and preparing it (once) needs TensorFlow: "
                f"pip install tensorflow, or run `tfds build {name} --file_format=array_record` where it is"
            ) from error
        raise UserError(f"{option}: needs {error.name}: pip install -e '.[data]'") from error
    if not sources:
        raise UserError(f"{option}: the data set has no splits")
    return sources


def open_tfds_text(rest: str, holdout: float) -> Source:
    option = f"--data tfds:{rest}"
    # A version (pg19:0.1.1) is the data set's; a word after the colon is a field.
    match = re.fullmatch(r"(?P<name>.+?)(?::(?P<field>[A-Za-z_]\w*))?", rest)
    assert match is not None
    name, field = match["name"], match["field"]
    sources = open_tfds(option, name)
    import tensorflow_datasets as tfds

    features = next(iter(sources.values())).dataset_info.features
    texts = sorted(n for n, f in features.items() if isinstance(f, tfds.features.Text))
    key = text_field(option, texts, field)

    def blocks(split: str, start: int, stop: int) -> Iterator[bytes]:
        for low in range(start, stop, _ROWS):
            with naming(option):
                examples = [sources[split][i] for i in range(low, min(low + _ROWS, stop))]
            yield from document_blocks(example[key] for example in examples)

    rows = {str(split): len(source) for split, source in sources.items()}
    info = next(iter(sources.values())).dataset_info
    fingerprint = digest("tfds", info.full_name, key, rows, holdout)
    return source_of_rows(fingerprint, option, rows, blocks, holdout)


def load_hf(option: str, spec: str, **options: Any) -> Any:
    """A data set of Hugging Face, NAME[:CONFIG] or a folder."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(f"{option}: needs {error.name}: pip install -e '.[data]'") from error
    folder = Path(spec).expanduser()
    name, _, config = spec.partition(":")
    with naming(option):
        if not folder.is_dir():
            return datasets.load_dataset(name, config or None, **options)
        saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
        whole = saved and not options
        return datasets.load_from_disk(folder) if whole else datasets.load_dataset(str(folder), **options)


def open_hf_text(rest: str, holdout: float) -> Source:
    option = f"--data hf:{rest}"
    loaded = load_hf(option, rest)
    tables: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    columns = {} if not tables else next(iter(tables.values())).features
    texts = [n for n, f in columns.items() if getattr(f, "dtype", None) in _STRINGS]
    key = text_field(option, texts, None, [n for n in columns if n not in texts])

    def blocks(split: str, start: int, stop: int) -> Iterator[bytes]:
        for low in range(start, stop, _ROWS):
            with naming(option):
                texts = tables[split][low : min(low + _ROWS, stop)][key]
            yield from document_blocks(texts)

    rows = {str(split): len(table) for split, table in tables.items()}
    files = sorted(f["filename"] for table in tables.values() for f in table.cache_files)
    stats = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    return source_of_rows(digest("hf", rest, key, rows, stats, holdout), option, rows, blocks, holdout)
