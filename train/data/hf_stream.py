"""Data sets of the Hugging Face hub that are read while training, never as a whole: --data hf-stream:NAME[:CONFIG].

Each row of a batch reads its own part of the training documents (whole files if there are enough of them), so
that a host reads only the parts of its rows, and the number of hosts may change when a run resumes.
"""

from __future__ import annotations

import base64
import concurrent.futures
import functools
import hashlib
import itertools
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from train.data.named_sources import document_blocks, load_hf, naming, text_field
from train.data.repeated import RowNumbers, check_identity, chosen_rows
from train.data.splits import SPLIT_NAMES, Source, Split
from train.data.tokenizers.base import Tokenizer
from train.data.tokenizers.pieces import text_pieces
from train.engine.batch import Batch
from train.engine.errors import UserError
from train.engine.hosts import gather
from train.engine.storage import digest

PREFIX = "hf-stream:"
# Documents that are held out where the data set has no validation split. They are the first ones.
_HELD_OUT_DOCUMENTS = 1000
_BLOCK_DOCUMENTS = 64
# Rows that are read to find the text's field.
_LOOKED_AT = 100
# Documents of a row that are shuffled together, by the seed.
_SHUFFLED_DOCUMENTS = 64


class Opened(NamedTuple):
    """A data set that nobody has read yet."""

    splits: dict[str, Any]
    """Its documents by split (train, valid, test), each to be read from the beginning."""
    field: str
    """Where a document has its text."""
    raw: Any
    """The training split as it is, the held-out documents included, which can be divided into parts."""
    held_out: int
    """How many documents at its beginning are held out."""


class StreamedText(NamedTuple):
    """The training documents of a data set, and how they become tokens."""

    dataset: Any
    """All of them, and before them `held_out` that do not belong to them."""
    field: str
    tokenizer: Tokenizer
    digest: str
    held_out: int = 0

    @property
    def tokens(self) -> tuple[()]:
        """Their number is not known."""
        return ()


def open_stream(spec: str) -> Opened:
    """The documents of a data set."""
    option = f"--data {PREFIX}{spec}"
    loaded = load_hf(option, spec, streaming=True)
    splits: dict[str, Any] = {}
    for given, dataset in loaded.items():
        if str(given) in SPLIT_NAMES:
            splits.setdefault(SPLIT_NAMES[str(given)], dataset)
    if "train" not in splits:
        raise UserError(
            f"{option}: expected a split named train, got {', '.join(map(str, loaded)) or 'none'}"
        )
    # Several rows, because the first may lack its text.
    with naming(option):
        first = list(itertools.islice(splits["train"], _LOOKED_AT))
    kinds: dict[str, set[type]] = {}
    for row in first:
        for name, value in row.items():
            kinds.setdefault(name, set()).update([] if value is None else [type(value)])
    texts = [name for name, found in kinds.items() if found == {str} or (name == "text" and not found)]
    field = text_field(option, texts, None, [name for name in kinds if name not in texts])
    raw, held_out = splits["train"], 0
    if "valid" not in splits:
        held_out = _HELD_OUT_DOCUMENTS
        splits["valid"], splits["train"] = raw.take(held_out), raw.skip(held_out)
    return Opened(splits, field, raw, held_out)


def open_stream_source(spec: str, holdout: float) -> Source:
    """The splits as text that is read from the beginning: for vocabularies, held-out tokens and shards."""
    splits, field, *_ = open_stream(spec)

    def blocks(split: str) -> Iterator[bytes]:
        with naming(f"--data {PREFIX}{spec}"):
            documents = iter(splits[split])
            while some := list(itertools.islice(documents, _BLOCK_DOCUMENTS)):
                yield from document_blocks(document.get(field) for document in some)

    return Source(
        digest("hf-stream", spec, field, *file_versions(spec)),
        {split: Split(functools.partial(blocks, split), None) for split in splits},
    )


def file_versions(spec: str) -> list[tuple[str, int, int]]:
    """What changes when the files of a local data set change."""
    folder = Path(spec).expanduser()
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _key(text: str | bytes | None) -> bytes:
    """What a document is known by: its text."""
    return hashlib.sha256(*document_blocks([text])).digest()


class _Position(NamedTuple):
    """A row's position: the number of its pass, the groups of documents it has read in it, where the last group
    begins (a state of `datasets`), and how many documents of that group it has taken."""

    epoch: int
    groups: int
    start: Any
    taken: int


class _Row:
    """The tokens of one row: the documents of its part, one after the other, again and again.

    Groups of them follow one another as in the part, and the seed decides the order within each.

    The held-out documents are known by their content. Skipping that many documents is not enough: a part that is a file
    would skip them in that file, wherever they are.
    """

    def __init__(self, text: StreamedText, number: int, rows: int, seed: int, held_out: Set[bytes]):
        self._text, self._number, self._rows, self._held_out = text, number, rows, held_out
        self._seed = seed
        self.left = np.zeros(0, np.int32)
        self._epoch = 0
        self._open()

    def _open(self) -> None:
        """Goes to the beginning of the part. One whose position was restored would go there again."""
        from datasets.distributed import split_dataset_by_node

        self._part = split_dataset_by_node(self._text.dataset, rank=self._number, world_size=self._rows)
        self._unread = iter(self._part)
        self._groups, self._start = 0, self._part.state_dict()
        self._group: list[Any] = []
        self._taken = 0

    def _read_group(self) -> None:
        self._start = self._part.state_dict()
        found = list(itertools.islice(self._unread, _SHUFFLED_DOCUMENTS))
        order = np.random.default_rng([self._seed, self._number, self._epoch, self._groups])
        self._group = [found[place] for place in order.permutation(len(found))]
        self._groups, self._taken = self._groups + 1, 0

    def _next_document(self) -> Any:
        """The next document of the pass, None at its end."""
        if self._taken == len(self._group):
            self._read_group()
        if not self._group:
            return None
        self._taken += 1
        return self._group[self._taken - 1]

    def take(self, count: int) -> Int[np.ndarray, " count"]:
        """The next tokens. The last one is given again, as the first of the next call."""
        pieces, have = [self.left], len(self.left)
        empty_passes = 0
        while have < count:
            document = self._next_document()
            if document is None:
                empty_passes += 1
                if empty_passes > 1:
                    raise UserError(
                        "--data: a part of the streamed data set has no text for training; expected more documents"
                        + f" than the {self._text.held_out} that are held out" * bool(self._text.held_out)
                    )
                self._epoch += 1
                self._open()
                continue
            if self._held_out and _key(document.get(self._text.field)) in self._held_out:
                continue
            for encoded in self._text.tokenizer.encode_corpus(
                text_pieces(document_blocks([document.get(self._text.field)]))
            ):
                pieces.append(encoded.ids.astype(np.int32))
                have += len(encoded.ids)
                if len(encoded.ids):
                    empty_passes = 0
        joined = np.concatenate(pieces)
        self.left = joined[count - 1 :]
        return joined[:count]

    def state(self) -> tuple[_Position, np.ndarray]:
        return _Position(self._epoch, self._groups, self._start, self._taken), self.left

    def restore(self, position: _Position, left: np.ndarray) -> None:
        """Goes to a state of `state`; reads the documents of one group again."""
        self.left, self._epoch, self._groups = left, position.epoch, position.groups
        self._part.load_state_dict(position.start)
        self._unread, self._group = iter(self._part), []
        if self._groups:
            self._groups -= 1
            self._read_group()
        self._start, self._taken = position.start, position.taken


class StreamedBatches:
    """Endless training batches from a data set that is never whole; see `train.data.streams.TokenStreams` for a batch.

    The state has the position of every row of the run, so that all processes must ask for it at the same time; it is
    restored bit for bit, by any number of processes. One batch is read ahead.
    """

    def __init__(
        self, text: StreamedText, *, batch: int, length: int, seed: int = 0, rows: RowNumbers = None
    ):
        first = text.dataset.take(text.held_out) if text.held_out else ()
        with naming("--data"):
            held_out = {_key(document.get(text.field)) for document in first}
        own = chosen_rows(batch, rows)
        self._rows = {int(number): _Row(text, int(number), batch, seed, held_out) for number in own}
        self._length, self._step = length, 0
        self._identity = {"batch": batch, "length": length, "seed": seed, "digest": text.digest}
        self._states = {number: row.state() for number, row in self._rows.items()}
        self._reader = concurrent.futures.ThreadPoolExecutor(1)
        self._next: concurrent.futures.Future[Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def _read(self) -> tuple[np.ndarray, dict[int, Any]]:
        tokens = np.stack([row.take(self._length + 1) for row in self._rows.values()])
        return tokens, {number: row.state() for number, row in self._rows.items()}

    def __next__(self) -> Batch:
        waiting = self._next or self._reader.submit(self._read)
        tokens, self._states = waiting.result()
        self._next = self._reader.submit(self._read)
        arrays = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch = Batch(arrays, reset=np.bool_(self._step == 0))
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position of all rows of all processes, as JSON."""
        own = {
            str(number): [position, base64.b64encode(left.tobytes()).decode()]
            for number, (position, left) in self._states.items()
        }
        rows = {number: state for part in gather(own) for number, state in part.items()}
        return {"step": self._step, **self._identity, "rows": rows}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a state of `get_state`; see `check_identity`."""
        check_identity(state, self._identity)
        if self._next is not None:
            self._next.result()
            self._next = None
        self._step = state["step"]
        for number, row in self._rows.items():
            position, left = state["rows"][str(number)]
            row.restore(_Position(*position), np.frombuffer(base64.b64decode(left), np.int32))
        self._states = {number: row.state() for number, row in self._rows.items()}

    def close(self) -> None:
        """Ends the reading thread."""
        self._reader.shutdown(wait=False, cancel_futures=True)
