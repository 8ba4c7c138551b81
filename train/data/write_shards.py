"""Tokenises a text in several processes, and writes its tokens as ArrayRecord shards (`train.data.shards`)."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from etils import epath

from brl_jax.fields import Range
from brl_jax.json_files import read_json
from train.data.dataset import DataConfig, check_holdout, tokenizer_of
from train.data.shards import MANIFEST, SHARD
from train.data.sources import naming_file, open_source
from train.data.splits import SPLITS, Source
from train.data.tokenizers.base import Tokenizer
from train.data.tokenizers.named import check_tokenizer, load_tokenizer
from train.data.tokenizers.pieces import Part, text_pieces
from train.data.worker_pool import worker_pool
from train.engine.errors import UserError
from train.engine.fields import Decided
from train.engine.folder import leaving_no_empty
from train.engine.metrics import clock, log, tracked
from train.engine.storage import check_local, check_writable, write_whole, writing

_STARTED = "started.json"


@dataclasses.dataclass(frozen=True)
class TokenizeOptions(DataConfig):
    """What to tokenise, and where to."""

    out: str = ""
    """Folder of the shards, local or mounted."""
    workers: Annotated[int, Range(1, 4096)] = max(1, os.cpu_count() or 1)
    """Processes that tokenise."""
    shard_megabytes: Annotated[int, Range(1, 2**16)] = 64
    """Text of a shard."""
    record: Annotated[int, Range(1, 2**24)] = 8192
    """Tokens of a record, the least that is read at a time."""
    cache_dir: Decided[str | None] = None

    def __post_init__(self):
        super().__post_init__()
        check_local("out", self.out)


def write_shards(options: TokenizeOptions) -> None:
    """Writes the shards of all splits of a text that do not exist yet, and last tokens.json."""
    if not options.out:
        raise UserError("--out: expected the folder of the shards")
    check_tokenizer(options.tokenizer)
    folder = Path(options.out).expanduser()
    check_writable("--out", folder)
    source = open_source(options.data, options.holdout, options.documents)
    check_holdout(options, source)
    names = ("data", "tokenizer", "holdout", "documents", "record", "shard_megabytes")
    asked = {name: getattr(options, name) for name in names} | {"fingerprint": source.fingerprint}
    _check_same(folder, asked)
    with leaving_no_empty(folder), naming_file(source):
        try:
            _write(options, folder, source, asked)
        finally:
            for split in SPLITS:  # what a worker that was ended has begun
                for path in folder.glob(f".{split}-*"):
                    path.unlink()


def _write(options: TokenizeOptions, folder: Path, source: Source, asked: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer = tokenizer_of(options.tokenizer, source, folder / "learnt")
        tokenizer.save(folder)
    write_whole(epath.Path(folder / _STARTED), json.dumps(asked, indent=1) + "\n")
    splits: dict[str, list[str]] = {}
    began = time.monotonic()
    with worker_pool(options.workers) as submit:
        for split in (split for split in SPLITS if split in source.splits):
            text = source.splits[split]
            parts = (
                (part, sum(map(len, part))) for part in _parts(text.blocks(), options.shard_megabytes << 20)
            )
            write = functools.partial(_write_shard, folder, record=options.record)
            splits[split] = []
            running: collections.deque[Any] = collections.deque()
            for number, part in enumerate(tracked(parts, text.size, split, in_bytes=True)):
                name = f"{split}-{number:05}"
                splits[split].append(name)
                if not (folder / f"{name}.json").exists():
                    running.append(submit(write, name, part))
                    if len(running) > options.workers:  # so that the text does not pile up in memory
                        running.popleft().result()
            while running:
                running.popleft().result()
    counts = {
        split: [read_json(folder / f"{n}.json", SHARD) for n in names] for split, names in splits.items()
    }
    if not any(shard["tokens"] for shard in counts.get("train", [])):
        raise UserError(f"--data: {options.data} has no train text to tokenise")
    write_whole(epath.Path(folder / MANIFEST), json.dumps(asked | {"splits": splits}, indent=1) + "\n")
    for split, shards in counts.items():
        log(f"{split}: {sum(shard['tokens'] for shard in shards):,} tokens in {len(shards)} shards")
    command = shlex.join(["python", "-m", "train.lm", "--data", f"tokens:{folder}"])
    log(f"done: {folder}, {clock(time.monotonic() - began)}; next: {command}")


def _check_same(folder: Path, asked: dict[str, Any]) -> None:
    """Raises UserError if the folder holds shards of something else."""
    try:
        before = read_json(folder / _STARTED, dict)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise UserError(f"--out: {error}; expected a new folder, or one that this command wrote") from error
    differing = [name for name in asked if asked[name] != before.get(name)]
    if differing:
        name = differing[0]
        what = "text" if name == "fingerprint" else f"{name} {before.get(name)!r}, now {asked[name]!r}"
        raise UserError(f"--out: {folder} has shards of another {what}; expected the same, or another folder")


def _parts(blocks: Iterator[bytes], size: int) -> Iterator[list[bytes]]:
    """The text in parts of up to this size, as `text_pieces`."""
    part: list[bytes] = []
    left = size
    for piece in text_pieces(blocks):
        if isinstance(piece, Part) and piece.weight != 1:
            raise UserError("--data: shards keep no weights of a text; expected to train on it directly")
        if part and len(piece) > left:
            yield part
            part, left = [], size
        part.append(piece)
        left -= len(piece)
    if part:
        yield part


def _write_shard(folder: Path, name: str, text: Sequence[bytes], *, record: int) -> None:
    """Tokenises a part of the text, in a worker process."""
    from array_record.python.array_record_module import ArrayRecordWriter

    tokenizer = _tokenizer(folder)
    encoded = list(tokenizer.encode_corpus(text))
    tokens = np.concatenate([each.ids for each in encoded]) if encoded else np.zeros(0, tokenizer.dtype)
    starts = np.cumsum([0, *(len(each.ids) for each in encoded)])
    extra = [each.extra + np.array([[start, 0]]) for each, start in zip(encoded, starts.tolist())]
    with writing(folder / f"{name}.array_record") as [aside]:
        # A record a group: a read of one record decodes no others.
        writer = ArrayRecordWriter(str(aside), "group_size:1")
        for start in range(0, len(tokens), record):
            writer.write(tokens[start : start + record].tobytes())
        writer.close()
    summary = {
        "tokens": len(tokens),
        "bytes": sum(map(len, text)),
        "digest": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "extra": np.concatenate(extra).tolist() if extra else [],
        "starts": [start for each, start in zip(encoded, starts.tolist()) if each.starts],
    }
    write_whole(epath.Path(folder / f"{name}.json"), json.dumps(summary) + "\n")


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)
