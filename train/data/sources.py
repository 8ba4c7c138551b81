"""Where text comes from: the standard library, files, TensorFlow Datasets and Hugging Face datasets.

A source is splits of bytes and nothing more: it knows no tokens. Documents that follow each other in a split
are separated by a line end; that joined text is what bits per byte are counted over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import glob
import gzip
import hashlib
import importlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.errors import UserError

SPLITS = ("train", "valid", "test")
_EXPECTED = "stdlib, text:GLOB, tfds:NAME[/CONFIG][:FIELD] or hf:NAME[:CONFIG]"
_BLOCK = 1 << 20
_ROWS = 256
_SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
# Folders of the standard library that are not its own, hold tests, or whose files programs wrote (help texts,
# character tables: one of them would be most of the held-out text).
_NOT_STDLIB = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}


@dataclasses.dataclass(frozen=True)
class Split:
    """The text of one split: `blocks()` reads it from the start; `size` is its bytes where known."""

    blocks: Callable[[], Iterator[bytes]]
    size: int | None


@dataclasses.dataclass(frozen=True)
class Source:
    """The splits of a text, by name, and a fingerprint that changes when the text does."""

    fingerprint: str
    splits: Mapping[str, Split]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Bytes [start, stop) of a file's uncompressed text; None is the end."""

    path: Path
    start: int = 0
    stop: int | None = None


def open_source(spec: str, holdout: float) -> Source:
    """Opens the text that `spec` names.

    Args:
      spec: stdlib, text:GLOB[,GLOB...], tfds:NAME[/CONFIG][:FIELD] or hf:NAME[:CONFIG] (or hf:FOLDER).
      holdout: share in (0, 1) of the text that becomes the valid split where the source has none of its own.

    Raises:
      UserError: an unknown spec, nothing there, a file or a hub that cannot be read.
    """
    if not 0 < holdout < 1:
        raise UserError(f"--holdout: expected a share between 0 and 1, got {holdout}")
    kind, _, rest = spec.partition(":")
    openers = {"text": _open_text, "tfds": _open_tfds, "hf": _open_hf}
    if spec == "stdlib":
        return _open_stdlib(holdout)
    if kind not in openers:
        near = difflib.get_close_matches(kind.lower(), ["stdlib", *openers], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"--data: unknown text {spec!r}, expected {_EXPECTED}{hint}")
    if not rest:
        raise UserError(f"--data: {spec!r} names nothing after the colon, expected {_EXPECTED}")
    return openers[kind](rest, holdout)


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- files
# --------------------------------------------------------------------------------------------------------


def _open_file(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _read(segment: _Segment) -> Iterator[bytes]:
    """The segment's bytes in blocks, a line end added where the last line has none."""
    last = b"\n"
    try:
        with _open_file(segment.path) as file:
            file.seek(segment.start)
            left = None if segment.stop is None else segment.stop - segment.start
            while block := file.read(_BLOCK if left is None else min(_BLOCK, left)):
                left = None if left is None else left - len(block)
                last = block
                yield block
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"--data: cannot read {segment.path}: {error}") from error
    if not last.endswith(b"\n"):
        yield b"\n"


def _split_of_segments(segments: Sequence[_Segment]) -> Split:
    def blocks() -> Iterator[bytes]:
        for segment in segments:
            yield from _read(segment)

    sizes = [
        (s.path.stat().st_size if s.stop is None else s.stop) - s.start
        for s in segments
        if s.stop is not None or s.path.suffix != ".gz"
    ]
    return Split(blocks, sum(sizes) if len(sizes) == len(segments) else None)


def _file_size(path: Path) -> int:
    """Length of the uncompressed text."""
    if path.suffix != ".gz":
        return path.stat().st_size
    try:
        with gzip.open(path, "rb") as file:
            return sum(len(block) for block in iter(lambda: file.read(_BLOCK), b""))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"--data: cannot read {path}: {error}") from error


def _open_stdlib(holdout: float) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in _NOT_STDLIB and not n.startswith("config-")]
        paths = [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
        # Links lead to what a distribution adds, outside the library.
        files += [p.relative_to(root).as_posix() for p in paths if not p.is_symlink()]
    splits: dict[str, list[_Segment]] = {"train": [], "valid": []}
    seen = []
    for name in sorted(files):
        text = (root / name).read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        # The name decides, so that a file stays on its side whatever else a Python version adds or drops.
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        splits["valid" if share < holdout else "train"].append(_Segment(root / name))
        seen.append((name, hashlib.sha256(text).hexdigest()))
    if not (splits["train"] and splits["valid"]):
        raise UserError(
            f"--data: stdlib finds {len(seen)} readable .py files under {root}, "
            "too few to train and hold out; use --data text:GLOB"
        )
    return Source(
        _digest("stdlib", seen, holdout), {name: _split_of_segments(s) for name, s in splits.items()}
    )


def _split_of_name(name: str) -> str:
    """train, valid or test where the file's name has such a word, train otherwise."""
    found = [_SPLIT_NAMES[w] for w in re.findall("[a-z]+", name.lower()) if w in _SPLIT_NAMES]
    return found[0] if found else "train"


def _open_text(pattern: str, holdout: float) -> Source:
    paths: list[Path] = []
    for part in filter(None, pattern.split(",")):
        found = sorted(p for p in glob.glob(os.path.expanduser(part), recursive=True) if os.path.isfile(p))
        if not found:
            raise UserError(f"--data: no file matches {part!r} (relative to {os.getcwd()})")
        paths += [Path(p).resolve() for p in found]
    paths = list(dict.fromkeys(paths))
    unreadable = [p for p in paths if not os.access(p, os.R_OK)]
    if unreadable:
        raise UserError(f"--data: cannot read {unreadable[0]}: permission denied")
    stats = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    paths = [p for p, (_, size, _) in zip(paths, stats) if size]
    if not paths:
        raise UserError(f"--data: text:{pattern} matches empty files only ({len(stats)})")
    by_split: dict[str, list[Path]] = {}
    for path in paths:
        by_split.setdefault(_split_of_name(path.name), []).append(path)
    splits = {name: [_Segment(p) for p in found] for name, found in by_split.items()}
    if "train" in splits and "valid" not in splits:
        splits["train"], splits["valid"] = _hold_out(by_split["train"], holdout)
    return Source(
        _digest("text", stats, holdout),
        {name: _split_of_segments(splits[name]) for name in SPLITS if name in splits},
    )


def _hold_out(paths: Sequence[Path], holdout: float) -> tuple[list[_Segment], list[_Segment]]:
    """Cuts the joined files in two near 1 - holdout of their bytes, before the line that this falls in.

    A line longer than a block is cut between two characters.
    """
    sizes = [_file_size(p) for p in paths]
    total = sum(sizes)
    if total < 2:
        raise UserError(f"--data: {paths[0]} has {total} bytes, too few to train and hold out a share")
    position = min(max(int(total * (1 - holdout)), 1), total - 1)
    index = 0
    while position >= sizes[index]:
        position -= sizes[index]
        index += 1
    start = max(0, position - _BLOCK)
    with _open_file(paths[index]) as file:
        file.seek(start)
        before, after = file.read(position - start), file.read(3)
    line_start = before.rfind(b"\n") + 1
    if line_start or (start == 0 and index > 0):
        position = start + line_start
    else:
        position += len(after) - len(after.lstrip(bytes(range(0x80, 0xC0))))
    train = [_Segment(p) for p in paths[:index]]
    train += [_Segment(paths[index], 0, position)] if position else []
    valid = [_Segment(paths[index], position, sizes[index])] if position < sizes[index] else []
    return train, valid + [_Segment(p) for p in paths[index + 1 :]]


# --- data sets by name
# --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """Makes one line of what a library raises, whatever part it comes from: network, hub, parser, files."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{option}: {first_line}") from error


def _join(texts: Iterable[str | bytes | None]) -> bytes:
    """Documents as one block, each ending its last line."""
    parts = [t.encode() if isinstance(t, str) else (t or b"") for t in texts]
    return b"".join(p if p.endswith(b"\n") else p + b"\n" for p in parts)


def _text_field(option: str, fields: Sequence[str], asked: str | None) -> str:
    """The field that holds the text: the one asked for, `text`, the only one, or the only one named so."""
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


def _split_rows(
    option: str,
    rows: Mapping[str, int],
    blocks: Callable[[str, int, int], Iterator[bytes]],
    holdout: float,
) -> dict[str, Split]:
    """Splits by the data set's own names; without a validation split, the last share of the training rows."""
    named: dict[str, str] = {}
    for name in rows:
        if name in _SPLIT_NAMES:
            named.setdefault(_SPLIT_NAMES[name], name)
    if not named:
        raise UserError(f"{option}: expected a split named train, got {', '.join(rows) or 'no split at all'}")
    bounds = {split: (name, 0, rows[name]) for split, name in named.items()}
    if "train" in bounds and "valid" not in bounds:
        name, _, count = bounds["train"]
        if count < 2:
            raise UserError(
                f"{option}: split {name!r} has {count} rows, too few to train and hold out a share"
            )
        cut = count - min(max(round(count * holdout), 1), count - 1)
        bounds["train"], bounds["valid"] = (name, 0, cut), (name, cut, count)
    return {s: Split(functools.partial(blocks, *bounds[s]), None) for s in SPLITS if s in bounds}


def open_tfds(option: str, name: str) -> Mapping[str, Any]:
    """The splits of a data set of TensorFlow Datasets, rows by number.

    Args:
      option: begins the errors.

    Raises:
      UserError: it is not known, not prepared here and cannot be, or has no splits.
    """
    try:
        import tensorflow_datasets as tfds

        importlib.import_module("tensorflow_datasets.text")  # registers wiki40b and its like
        with _naming(option):
            sources: dict[str, Any] = tfds.data_source(name)
    except ModuleNotFoundError as error:
        if "'tensorflow'" in str(error):
            raise UserError(
                f"{option}: not prepared on this machine, and preparing it (once) needs TensorFlow: "
                f"pip install tensorflow, or run `tfds build {name} --file_format=array_record` where it is"
            ) from error
        raise UserError(f"{option}: needs {error.name}: pip install 'brl-jax[data]'") from error
    if not sources:
        raise UserError(f"{option}: the data set has no splits")
    return sources


def _open_tfds(rest: str, holdout: float) -> Source:
    option = f"--data tfds:{rest}"
    # A version (pg19:0.1.1) is the data set's; a word after the colon is a field.
    match = re.fullmatch(r"(?P<name>.+?)(?::(?P<field>[A-Za-z_]\w*))?", rest)
    assert match is not None
    name, field = match["name"], match["field"]
    sources = open_tfds(option, name)
    import tensorflow_datasets as tfds

    features = next(iter(sources.values())).dataset_info.features
    texts = sorted(n for n, f in features.items() if isinstance(f, tfds.features.Text))
    key = _text_field(option, texts, field)

    def blocks(split: str, start: int, stop: int) -> Iterator[bytes]:
        for low in range(start, stop, _ROWS):
            with _naming(option):
                examples = [sources[split][i] for i in range(low, min(low + _ROWS, stop))]
            yield _join(example[key] for example in examples)

    rows = {str(split): len(source) for split, source in sources.items()}
    info = next(iter(sources.values())).dataset_info
    fingerprint = _digest("tfds", info.full_name, key, rows, holdout)
    return Source(fingerprint, _split_rows(option, rows, blocks, holdout))


def _open_hf(rest: str, holdout: float) -> Source:
    option = f"--data hf:{rest}"
    folder = Path(rest).expanduser()
    name, _, config = rest.partition(":")
    try:
        import datasets

        with _naming(option):
            if folder.is_dir():
                saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
                loaded: Any = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(folder))
            else:
                loaded = datasets.load_dataset(name, config or None)
    except ModuleNotFoundError as error:
        raise UserError(f"{option}: needs {error.name}: pip install 'brl-jax[data]'") from error
    tables: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    columns = {} if not tables else next(iter(tables.values())).features
    texts = [n for n, f in columns.items() if getattr(f, "dtype", None) in ("string", "large_string")]
    key = _text_field(option, texts, None)

    def blocks(split: str, start: int, stop: int) -> Iterator[bytes]:
        for low in range(start, stop, _ROWS):
            with _naming(option):
                texts = tables[split][low : min(low + _ROWS, stop)][key]
            yield _join(texts)

    rows = {str(split): len(table) for split, table in tables.items()}
    files = sorted(f["filename"] for table in tables.values() for f in table.cache_files)
    stats = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    return Source(_digest("hf", rest, key, rows, stats, holdout), _split_rows(option, rows, blocks, holdout))
