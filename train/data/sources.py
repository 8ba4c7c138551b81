"""Where text comes from: the standard library, files, TensorFlow Datasets and Hugging Face datasets.

A source is splits of bytes and nothing more: it knows no tokens. Documents that follow each other in a split
are separated by a line end; bits per byte are counted over that joined text.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import gzip
import hashlib
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from train.data.named_sources import open_hf_text, open_tfds_text
from train.data.splits import SPLIT_NAMES, SPLITS, Source, Split, digest
from train.errors import UserError

_EXPECTED = "stdlib, text:GLOB, tfds:NAME[/CONFIG][:FIELD] or hf:NAME[:CONFIG]"
_BLOCK = 1 << 20
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
      UserError: the spec is unknown, names nothing, or a file or a hub cannot be read.
    """
    if not 0 < holdout < 1:
        raise UserError(f"--holdout: expected a share between 0 and 1, got {holdout}")
    kind, _, rest = spec.partition(":")
    openers = {"text": _open_text, "tfds": open_tfds_text, "hf": open_hf_text}
    if spec == "stdlib":
        return _open_stdlib(holdout)
    if kind not in openers:
        near = difflib.get_close_matches(kind.lower(), ["stdlib", *openers], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"--data: unknown text {spec!r}, expected {_EXPECTED}{hint}")
    if not rest:
        raise UserError(f"--data: {spec!r} names nothing after the colon, expected {_EXPECTED}")
    return openers[kind](rest, holdout)


def _open_file(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _read(segment: _Segment) -> Iterator[bytes]:
    """The segment's bytes in blocks; a line end is added where the last line has none."""
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
        splits["valid" if share < holdout else "train"].append(_Segment(root / name))
        seen.append((name, hashlib.sha256(text).hexdigest()))
    if not (splits["train"] and splits["valid"]):
        raise UserError(
            f"--data: stdlib finds {len(seen)} readable .py files under {root}, "
            "too few to train and hold out; use --data text:GLOB"
        )
    return Source(
        digest("stdlib", seen, holdout), {name: _split_of_segments(s) for name, s in splits.items()}
    )


def _split_of_name(name: str) -> str:
    """train, valid or test where the file's name contains such a word; otherwise train."""
    found = [SPLIT_NAMES[w] for w in re.findall("[a-z]+", name.lower()) if w in SPLIT_NAMES]
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
        digest("text", stats, holdout),
        {name: _split_of_segments(splits[name]) for name in SPLITS if name in splits},
    )


def _hold_out(paths: Sequence[Path], holdout: float) -> tuple[list[_Segment], list[_Segment]]:
    """Splits the joined files in two near 1 - holdout of their bytes, before the line that contains this position.

    A line longer than a block is split between two characters.
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
