"""Where text comes from: the standard library, files, TensorFlow Datasets and Hugging Face datasets.

A source is splits of bytes, and where documents start in them: it knows no tokens. Documents that follow each other in
a split are separated by a line end; bits per byte are counted over that joined text.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import dataclasses
import difflib
import functools
import glob
import gzip
import hashlib
import itertools
import lzma
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from train.data.documents import RECORDS, check_documents, cut_documents
from train.data.hf_stream import open_stream_source
from train.data.json_lines import Line, documents
from train.data.named_sources import open_hf_text, open_tfds_text, source_of_rows
from train.data.splits import SPLIT_NAMES, SPLITS, Source, Split
from train.data.tokenizers.base import CONFIG
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.pieces import DocumentStart, NotUtf8
from train.engine.errors import UNREADABLE, UserError, one_line, reason
from train.engine.storage import as_os_errors, digest, is_remote, wait_for_answer

_EXPECTED = (
    "stdlib, text:GLOB, jsonl:GLOB, tfds:NAME[/CONFIG][:FIELD], hf:NAME[:CONFIG], hf-stream:NAME[:CONFIG], "
    "tokens:DIR or mix:WEIGHT*TEXT,WEIGHT*TEXT"
)
_BLOCK = 1 << 20
_OPENERS: dict[str, Callable[[str], Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}
# The first bytes of compressed files.
_COMPRESSED = {
    "gzip": rb"\x1f\x8b",
    "bz2": rb"BZh[1-9]1AY&SY",
    "xz": rb"\xfd7zXZ\x00",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "lz4": rb"\x04\x22\x4d\x18",
    "zip": rb"PK\x03\x04",
}
_COMPRESSED_NAMES = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
# Folders of the standard library that are not its own, hold tests, or whose files are generated (help texts, character
# tables: one of them would be most of the held-out text).
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
class _File:
    """A file of text, local or at an address that fsspec reads (gs://..., s3://...).

    address: its path or address. size: its bytes, compressed if it is. version: changes when the file does.
    """

    address: str
    size: int
    version: Any

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @functools.cached_property
    def compression(self) -> str | None:
        """gzip, bz2 or xz, by the first bytes; None for text."""
        with _reading(self), self._open(None) as file:
            start = file.read(16)
        kind = next((kind for kind, pattern in _COMPRESSED.items() if re.match(pattern, start)), None)
        named = self.name.lower().endswith(_COMPRESSED_NAMES)
        if kind in ("zstd", "lz4", "zip") or (named and kind is None):
            problem = "is named as compressed and is not" if kind is None else f"is compressed by {kind}"
            raise UserError(
                f"--data: cannot read {self.address}: it {problem}; expected text, or text compressed by "
                f"{', '.join(_OPENERS)}"
            )
        return kind

    def open(self) -> Any:
        """The uncompressed text, as a binary file."""
        return self._open(self.compression)

    def _open(self, compression: str | None) -> Any:
        if not is_remote(self.address):
            return open(self.address, "rb") if compression is None else _OPENERS[compression](self.address)
        import fsspec

        return fsspec.open(self.address, compression=compression).open()

    def num_bytes(self) -> int:
        """Length of the uncompressed text."""
        if self.compression is None:
            return self.size
        with _reading(self), self.open() as file:
            return sum(len(block) for block in iter(lambda: file.read(_BLOCK), b""))


@contextlib.contextmanager
def _reading(file: _File) -> Iterator[None]:
    """Turns what reading a file raises into a line."""
    try:
        with as_os_errors():
            yield
    except UNREADABLE as error:
        raise UserError(f"--data: cannot read {file.address}: {reason(error)}") from error


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Bytes [start, stop) of a file's uncompressed text; None is the end."""

    file: _File
    start: int = 0
    stop: int | None = None


def open_source(
    spec: str,
    holdout: float,
    documents: str = RECORDS,
    template: Callable[[], ChatTemplate | None] = lambda: None,
) -> Source:
    """Opens the text that `spec` names.

    Args:
      spec: the kinds of `_EXPECTED` but tokens and mix.
      holdout: share in (0, 1) of the text that becomes the valid split if the source has none.
      documents: what a document is, see `train.data.documents`. A file starts one in any case, a row of a data set only
        as a record.
      template: returns how chats (jsonl:) become text; called where the text is read.
    """
    first_line = check_documents(documents)
    source = _open(spec, holdout, template)
    if first_line is None:
        return source
    cut = functools.partial(
        cut_documents, first_line=first_line, keep=spec.partition(":")[0] in ("stdlib", "text")
    )
    splits = {
        name: Split(functools.partial(_mapped, split, cut), split.size)
        for name, split in source.splits.items()
    }
    return dataclasses.replace(source, splits=splits)


@contextlib.contextmanager
def naming_file(source: Source) -> Iterator[None]:
    """Names the file in the error about text that is not UTF-8."""
    try:
        yield
    except NotUtf8 as error:
        place = next((address for address, read in source.readers.items() if not _is_utf8(read)), None)
        if place is None:
            raise
        raise UserError(str(error).replace("the text", place, 1)) from error


def _is_utf8(read: Callable[[], Any]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with read() as file:
            for block in iter(lambda: file.read(_BLOCK), b""):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _mapped(split: Split, change: Callable[[Iterator[bytes]], Iterator[bytes]]) -> Iterator[bytes]:
    return change(split.blocks())


def _open(spec: str, holdout: float, template: Callable[[], ChatTemplate | None]) -> Source:
    if not 0 < holdout < 1:
        raise UserError(f"--holdout: expected a share between 0 and 1, got {holdout}")
    kind, _, rest = spec.partition(":")
    openers: dict[str, Callable[[str, float], Source]] = {
        "text": _open_text,
        "jsonl": functools.partial(_open_json_lines, template=template),
        "tfds": open_tfds_text,
        "hf": open_hf_text,
        "hf-stream": open_stream_source,
    }
    if spec == "stdlib":
        return _open_stdlib(holdout)
    if kind in ("tokens", "mix"):
        raise UserError(f"--data: expected a text to tokenise, got {spec!r}")
    if kind not in openers:
        near = [f"text:{spec}"] if os.path.isfile(spec) else []
        near += difflib.get_close_matches(kind.lower(), ["stdlib", *openers], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"--data: unknown text {spec!r}, expected {_EXPECTED}{hint}")
    if not rest:
        raise UserError(f"--data: {spec!r} names no text, expected {_EXPECTED}")
    return openers[kind](rest, holdout)


def _read(segment: _Segment) -> Iterator[bytes]:
    """The segment's bytes in blocks, as a document, without a byte order mark; a line end is added if the last line has
    none."""
    last, kind = b"\n", cast(type[bytes], DocumentStart)
    with _reading(segment.file), segment.file.open() as file:
        file.seek(segment.start)
        left = None if segment.stop is None else segment.stop - segment.start
        while block := file.read(_BLOCK if left is None else min(_BLOCK, left)):
            left = None if left is None else left - len(block)
            last = block
            if kind is DocumentStart and segment.start == 0:
                block = block.removeprefix(codecs.BOM_UTF8)
            yield kind(block)
            kind = bytes
    if not last.endswith(b"\n"):
        yield b"\n"


def _split_of_segments(segments: Sequence[_Segment]) -> Split:
    def blocks() -> Iterator[bytes]:
        for segment in segments:
            yield from _read(segment)

    sizes = [
        (s.file.size if s.stop is None else s.stop) - s.start
        for s in segments
        if s.stop is not None or s.file.compression is None
    ]
    return Split(blocks, sum(sizes) if len(sizes) == len(segments) else None)


def _open_stdlib(holdout: float) -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [n for n in folders if n not in _NOT_STDLIB and not n.startswith("config-")]
        paths = [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
        # Links lead outside the library, to what a distribution adds.
        files += [p.relative_to(root).as_posix() for p in paths if not p.is_symlink()]
    splits: dict[str, list[_Segment]] = {"train": [], "valid": []}
    seen = []
    for name in sorted(files):
        text = (root / name).read_bytes()
        try:
            text.decode()
        except UnicodeDecodeError:
            continue
        # The name decides, so that a file stays in its split whatever files a Python version adds or drops.
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        file = _File(str(root / name), len(text), None)
        splits["valid" if share < holdout else "train"].append(_Segment(file))
        seen.append((name, hashlib.sha256(text).hexdigest()))
    if not (splits["train"] and splits["valid"]):
        raise UserError(
            f"--data: stdlib finds {len(seen)} readable .py files under {root}, "
            "too few to train and hold out; use --data text:GLOB"
        )
    return Source(
        digest("stdlib", seen, holdout),
        {name: _split_of_segments(s) for name, s in splits.items()},
        holds_out=True,
    )


def _split_of_name(name: str) -> str:
    """train, valid or test where the file's name contains such a word; otherwise train."""
    found = [SPLIT_NAMES[w] for w in re.findall("[a-z]+", name.lower()) if w in SPLIT_NAMES]
    return found[0] if found else "train"


def _find_local(pattern: str) -> list[_File]:
    found = [p for p in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(p)]
    # Not resolved: a link's name says what is in the file, its target's may not.
    paths = [Path(os.path.abspath(p)) for p in sorted(found)]
    # The words of a run's tokenizer are not text, although the run's folder may be among the texts.
    paths = [p for p in paths if p.name != "vocab.txt" or not (p.parent / CONFIG).exists()]
    unreadable = [p for p in paths if not os.access(p, os.R_OK)]
    if unreadable:
        raise UserError(f"--data: cannot read {unreadable[0]}: permission denied")
    return [_File(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]


def _find_remote(pattern: str) -> list[_File]:
    try:
        import fsspec

        wait_for_answer(pattern)
        with as_os_errors():
            files, path = fsspec.core.url_to_fs(pattern)
            found = [info for info in files.glob(path, detail=True).values() if info["type"] == "file"]
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"--data: cannot read {pattern}: {one_line(error)}") from error
    # What changes with the file is called otherwise by each kind of store.
    versions = ("generation", "ETag", "etag", "mtime", "LastModified", "created")
    return [
        _File(
            files.unstrip_protocol(info["name"]),
            info["size"],
            next((str(info[name]) for name in versions if info.get(name) is not None), None),
        )
        for info in sorted(found, key=lambda info: info["name"])
    ]


def _place(file: _File) -> str:
    return file.address if is_remote(file.address) else os.path.realpath(file.address)


def _find(kind: str, pattern: str) -> tuple[list[_File], dict[str, list[_File]]]:
    """The files that match, and by split those that are not empty."""
    every: list[_File] = []
    for part in filter(None, pattern.split(",")):
        found = _find_remote(part) if is_remote(part) else _find_local(part)
        if not found:
            if not is_remote(part) and Path(part).expanduser().is_dir():
                raise UserError(
                    f"--data: {part} is a folder; expected files, such as {kind}:{part.rstrip('/')}/*"
                )
            where = "" if is_remote(part) else f" (relative to {os.getcwd()})"
            raise UserError(f"--data: no file matches {part!r}{where}")
        every += found
    # A link and its target are one file, by the name that comes first.
    every = list({_place(file): file for file in reversed(every)}.values())[::-1]
    files = [file for file in every if file.size]
    if not files:
        raise UserError(f"--data: {kind}:{pattern} matches empty files only ({len(every)})")
    by_split: dict[str, list[_File]] = {}
    for file in files:
        by_split.setdefault(_split_of_name(file.name), []).append(file)
    return every, by_split


def _open_text(pattern: str, holdout: float) -> Source:
    every, by_split = _find("text", pattern)
    splits = {name: [_Segment(file) for file in found] for name, found in by_split.items()}
    if "train" in splits and "valid" not in splits:
        splits["train"], splits["valid"] = _hold_out(by_split["train"], holdout)
    return Source(
        digest("text", [dataclasses.astuple(file) for file in every], holdout),
        {name: _split_of_segments(splits[name]) for name in SPLITS if name in splits},
        {file.address: file.open for found in by_split.values() for file in found},
        holds_out="valid" not in by_split,
    )


def _open_json_lines(pattern: str, holdout: float, *, template: Callable[[], ChatTemplate | None]) -> Source:
    every, by_split = _find("jsonl", pattern)

    def blocks(split: str, start: int, stop: int) -> Iterator[bytes]:
        yield from documents(itertools.islice(_lines(by_split[split]), start, stop), template)

    rows = {split: sum(1 for _ in _lines(files)) for split, files in by_split.items()}
    fingerprint = digest("jsonl", [dataclasses.astuple(file) for file in every], holdout)
    return source_of_rows(fingerprint, f"--data jsonl:{pattern}", rows, blocks, holdout)


def _lines(files: Sequence[_File]) -> Iterator[Line]:
    """The lines of the files, without those of blanks and without byte order marks."""
    for file in files:
        with _reading(file), file.open() as opened:
            for number, text in enumerate(opened, 1):
                text = text.removeprefix(codecs.BOM_UTF8) if number == 1 else text
                if text.strip():
                    yield Line(file.address, number, text)


def _hold_out(files: Sequence[_File], holdout: float) -> tuple[list[_Segment], list[_Segment]]:
    """Splits the joined files in two near 1 - holdout of their bytes, before the line that contains this position.

    A line that would more than double the share is split between two characters.
    """
    sizes = [file.num_bytes() for file in files]
    total = sum(sizes)
    if total < 2:
        raise UserError(
            f"--data: {files[0].address} has {total} bytes, too few to train and hold out a share"
        )
    position = min(max(int(total * (1 - holdout)), 1), total - 1)
    # A few lines of any text are enough to find a line end in, however small the share.
    nearby = min(max(total - position, 1 << 12), _BLOCK)
    index = 0
    while position >= sizes[index]:
        position -= sizes[index]
        index += 1
    start = max(0, position - nearby)
    with _reading(files[index]), files[index].open() as opened:
        opened.seek(start)
        before, after = opened.read(position - start), opened.read(3)
    line_start = before.rfind(b"\n") + 1
    if line_start or (start == 0 and index > 0):
        position = start + line_start
    else:
        position += len(after) - len(after.lstrip(bytes(range(0x80, 0xC0))))
    train = [_Segment(file) for file in files[:index]]
    train += [_Segment(files[index], 0, position)] if position else []
    valid = [_Segment(files[index], position, sizes[index])] if position < sizes[index] else []
    return train, valid + [_Segment(file) for file in files[index + 1 :]]
