"""Tokenizers: bytes, characters, byte-level BPE and words, behind one interface that also counts the text's bytes."""

from __future__ import annotations

import abc
import difflib
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int

from train.data.files import write_whole
from train.errors import UserError

_EXPECTED = (
    "bytes, chars, chars:MIN_COUNT, chars:max=SIZE, bpe:SIZE, words, words:MIN_COUNT or words:max=SIZE"
)
_PIECE = 1 << 20
# BPE learns from this much text at most: merges settle long before, and the trainer keeps every distinct word
# in memory.
_BPE_TRAINING_BYTES = 1 << 29
# The library spreads a batch of pieces over the cores, and keeps some hundred bytes a token until it is done.
_BPE_PIECE, _BPE_BATCH = 1 << 16, 64
_NO_EXTRA = np.zeros((0, 2), np.int64)

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
UNKNOWN_CHARACTER = "\ufffd"


class Encoded(NamedTuple):
    """Tokens of a piece of text, and where they stand for other than `token_bytes` bytes of it.

    ids: (n,) integers. extra: (k, 2) int64, rows (place in ids, bytes of the text beyond token_bytes[id]).
    """

    ids: np.ndarray
    extra: np.ndarray


class Tokenizer(abc.ABC):
    """Text to integers in [0, vocab_size) and back.

    spec: the command line's word for it. token_bytes: (vocab_size,) int64, bytes of text each token usually
    stands for.
    """

    spec: str
    token_bytes: Int[np.ndarray, " vocab"]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.token_bytes)

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint8, uint16 and int32 that holds every token."""
        size = self.vocab_size
        return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32)

    @property
    def digest(self) -> str:
        """Hash of everything that decides what text encodes to."""
        return hashlib.sha256(json.dumps([self.spec, self._payload()]).encode()).hexdigest()

    @abc.abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """Tokens of `text`, (length,) int32. Raises UserError where a part has no token."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """Text of the tokens; bytes that are no UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        """Tokens of a long text given as `text_pieces`, a piece at a time; no word is refused.

        Raises UserError where the text is not UTF-8 (bytes: never).
        """

    def _payload(self) -> dict[str, str]:
        """Files, by name, that `load_tokenizer` needs besides the spec."""
        return {}

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes tokenizer_config.json and what belongs to it (bpe: tokenizer.json, words: vocab.txt, chars:
        characters.json).

        Each file is written aside and renamed; the configuration comes last, so that a folder that has it is
        whole.
        """
        folder = epath.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        files = self._payload() | {"tokenizer_config.json": json.dumps({"tokenizer": self.spec}) + "\n"}
        for name, text in files.items():
            write_whole(folder / name, text)


class BytesTokenizer(Tokenizer):
    """The bytes of the text's UTF-8 form: 256 symbols, nothing unknown."""

    spec = "bytes"
    token_bytes = np.ones(256, np.int64)

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        # What the command line could not decode comes as surrogates, each standing for its byte.
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        return np.asarray(ids).astype(np.uint8).tobytes().decode(errors="replace")

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        for piece in pieces:
            yield Encoded(np.frombuffer(piece, np.uint8), _NO_EXTRA)


class CharactersTokenizer(Tokenizer):
    """The characters of the training text, and U+FFFD for others (character-level language modeling: 002, 5.1)."""

    def __init__(self, spec: str, characters: Sequence[str]):
        self.spec = spec
        self._characters = list(characters)
        self._unknown = self._characters.index(UNKNOWN_CHARACTER)
        codes = np.array([ord(c) for c in self._characters], np.uint32)
        self._order = np.argsort(codes).astype(np.int32)
        self._codes = codes[self._order]
        self.token_bytes = np.array([len(c.encode()) for c in self._characters], np.int64)

    @classmethod
    def train(
        cls, spec: str, pieces: Iterable[bytes], min_count: int, size: int | None
    ) -> CharactersTokenizer:
        """Keeps the characters seen `min_count` times, the `size` most frequent with U+FFFD included."""
        counts: Counter[str] = Counter()
        for piece in pieces:
            counts.update(_decode(piece))
        kept = [c for c, n in counts.items() if n >= min_count and c != UNKNOWN_CHARACTER]
        kept.sort(key=lambda c: (-counts[c], c))
        return cls(spec, [UNKNOWN_CHARACTER, *kept][:size])

    def _find(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Token of each character, and whether it has one of its own."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        known = self._codes[places] == codes
        return np.where(known, self._order[places], self._unknown).astype(np.int32), known

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        ids, known = self._find(text)
        unknown = list(dict.fromkeys(text[i] for i in np.flatnonzero(~known)))
        if unknown:
            shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            raise UserError(
                f"text has {len(unknown)} characters outside the vocabulary of {self.vocab_size}: {shown}; "
                "expected characters of the training text"
            )
        return ids

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        return "".join(self._characters[i] for i in np.asarray(ids).tolist())

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        for piece in pieces:
            text = _decode(piece)
            ids, known = self._find(text)
            unknown = np.flatnonzero(~known)
            sizes = np.array([len(text[i].encode()) for i in unknown], np.int64)
            extra = np.stack([unknown, sizes - self.token_bytes[self._unknown]], 1)
            yield Encoded(ids.astype(self.dtype), extra)

    def _payload(self) -> dict[str, str]:
        return {"characters.json": json.dumps(self._characters) + "\n"}


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding, by the tokenizers library.

    Sennrich et al. 2016 (arXiv:1508.07909, algorithm 1) over bytes in place of characters, as in GPT-2. Every
    text can be encoded and is got back exactly.
    """

    def __init__(self, spec: str, model: Any):
        self.spec = spec
        self._model = model
        # The byte-level alphabet writes each byte as one character.
        tokens = [model.id_to_token(i) for i in range(model.get_vocab_size())]
        self.token_bytes = np.array([len(t) for t in tokens], np.int64)

    @classmethod
    def train(cls, size: int, pieces: Iterable[bytes]) -> BPETokenizer:
        """Learns up to `size` tokens from the text."""
        import tokenizers

        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(map(_decode, _head(pieces, _BPE_TRAINING_BYTES)), trainer)
        return cls(f"bpe:{size}", model)

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        if not text.isascii() and text.encode(errors="replace").decode() != text:
            raise UserError(
                f"text is not UTF-8: {text!r}; expected text that is, or a model with --tokenizer bytes"
            )
        return np.array(self._model.encode(text).ids, np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        return self._model.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        batch: list[str] = []
        for piece in text_pieces(pieces, _BPE_PIECE):
            batch.append(_decode(piece))
            if len(batch) == _BPE_BATCH:
                yield from self._encode_batch(batch)
                batch = []
        yield from self._encode_batch(batch)

    def _encode_batch(self, texts: list[str]) -> Iterator[Encoded]:
        for encoding in self._model.encode_batch_fast(texts):
            yield Encoded(np.array(encoding.ids, self.dtype), _NO_EXTRA)

    def _payload(self) -> dict[str, str]:
        return {"tokenizer.json": self._model.to_str()}


class WordsTokenizer(Tokenizer):
    """Words between blanks, `<eos>` at each line's end, `<unk>` for words outside the vocabulary.

    WikiText's way (Merity et al. 2016, arXiv:1609.07843). Runs of blanks are one blank.
    token_bytes counts a word and the blank after it; what else a line holds belongs to its `<eos>`.
    """

    def __init__(self, spec: str, words: Sequence[str]):
        self.spec = spec
        self._words = list(words)
        self._unknown, self._end = self._words.index(UNKNOWN), self._words.index(END_OF_LINE)
        self._ids = {word: i for i, word in enumerate(self._words)}
        del self._ids[END_OF_LINE]  # these letters in a text are no line's end
        self._ids["\n"] = self._end
        self.token_bytes = np.array([len(w.encode()) + 1 for w in self._words], np.int64)
        self.token_bytes[self._end] = 0

    @classmethod
    def train(cls, spec: str, pieces: Iterable[bytes], min_count: int, size: int | None) -> WordsTokenizer:
        """Keeps the words seen `min_count` times, the `size` most frequent with the two marks included."""
        counts: Counter[str] = Counter()
        for piece in pieces:
            counts.update(_decode(piece).split())
        kept = [w for w, n in counts.items() if n >= min_count and w not in (UNKNOWN, END_OF_LINE)]
        kept.sort(key=lambda w: (-counts[w], w))
        return cls(spec, [UNKNOWN, END_OF_LINE, *kept][:size])

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        words = _words(text)
        unknown = [w for w in dict.fromkeys(words) if w not in self._ids]
        if unknown:
            shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            raise UserError(
                f"text has {len(unknown)} words outside the vocabulary of {self.vocab_size}: {shown}; "
                f"expected words of the training text, or {UNKNOWN}"
            )
        return np.array([self._ids[w] for w in words], np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        text = " ".join("\n" if i == self._end else self._words[i] for i in np.asarray(ids).tolist())
        return re.sub(" ?\n ?", "\n", text)

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        open_line = 0  # bytes of the unfinished line that no token stands for yet
        for piece in pieces:
            words = _words(_decode(piece))
            found = map(self._ids.get, words, itertools.repeat(self._unknown))
            ids = np.fromiter(found, np.int64, len(words))
            sizes = self.token_bytes[ids]
            unknown = np.flatnonzero(ids == self._unknown)
            sizes[unknown] = [len(words[i].encode()) + 1 for i in unknown]
            ends = np.flatnonzero(ids == self._end)
            line_ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + 1
            spent = np.concatenate([[0], np.cumsum(sizes)])
            # Bytes of the lines so far, less the bytes that their words stand for.
            surplus = open_line + line_ends - spent[ends]
            sizes[ends] = np.diff(surplus, prepend=0)
            open_line += len(piece) - int(sizes.sum())
            changed = np.flatnonzero(sizes != self.token_bytes[ids])
            extra = np.stack([changed, (sizes - self.token_bytes[ids])[changed]], 1)
            yield Encoded(ids.astype(self.dtype), extra)

    def _payload(self) -> dict[str, str]:
        return {"vocab.txt": "".join(w + "\n" for w in self._words)}


def _words(text: str) -> list[str]:
    """The words of the lines, and a line end after each line that is ended."""
    words: list[str] = []
    for i, line in enumerate(text.split("\n")):
        if i:
            words.append("\n")
        words += line.split()
    return words


def _decode(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data: the text is not UTF-8 ({piece[error.start : error.start + 8]!r}); "
            "convert it, or use --tokenizer bytes"
        ) from error


def _head(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Pieces until `size` bytes are reached."""
    for piece in pieces:
        yield piece
        size -= len(piece)
        if size <= 0:
            return


def text_pieces(blocks: Iterable[bytes], size: int = _PIECE) -> Iterator[bytes]:
    """The blocks' text in pieces of up to `size` bytes, cut after a line, else a blank, else a character."""
    pending = bytearray()
    for block in blocks:
        pending += block
        start = 0
        while len(pending) - start > size:
            stop = start + size
            cut = pending.rfind(b"\n", start, stop) + 1 or pending.rfind(b" ", start, stop) + 1
            if not cut:
                cut = stop
                while cut > stop - 3 and pending[cut] & 0xC0 == 0x80:
                    cut -= 1
            yield bytes(pending[start:cut])
            start = cut
        del pending[:start]
    if pending:
        yield bytes(pending)


def check_tokenizer(spec: str) -> None:
    """Raises UserError unless `spec` is a tokenizer that `train_tokenizer` can make."""
    _parse(spec)


def _parse(spec: str) -> Callable[[Callable[[], Iterable[bytes]]], Tokenizer]:
    kind, colon, rest = spec.partition(":")
    if spec == "bytes":
        return lambda pieces: BytesTokenizer()
    if kind == "bpe":
        if not rest.isdecimal() or int(rest) <= 256:
            raise UserError(f"--tokenizer: bpe:SIZE needs a whole number above 256, got {spec!r}")
        return lambda pieces: BPETokenizer.train(int(rest), pieces())
    if kind in ("words", "chars"):
        learner, least = (WordsTokenizer, 3) if kind == "words" else (CharactersTokenizer, 2)
        match = re.fullmatch(r"(max=)?(\d+)", rest) if colon else None
        if colon and (match is None or int(match[2]) < (least if match[1] else 1)):
            raise UserError(
                f"--tokenizer: {kind} takes a count of at least 1 ({kind}:3) "
                f"or a size of at least {least} ({kind}:max=50000), got {spec!r}"
            )
        number = int(match[2]) if match else 1
        limits = (
            {"min_count": 1, "size": number} if match and match[1] else {"min_count": number, "size": None}
        )
        return lambda pieces: learner.train(spec, pieces(), **limits)
    near = difflib.get_close_matches(kind.lower(), ["bytes", "chars", "bpe", "words"], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"--tokenizer: unknown tokenizer {spec!r}, expected {_EXPECTED}{hint}")


def train_tokenizer(spec: str, pieces: Callable[[], Iterable[bytes]]) -> Tokenizer:
    """Makes the tokenizer that `spec` asks for; all but bytes learn their vocabulary from the pieces.

    Args:
      spec: bytes, bpe:SIZE, words[:MIN_COUNT] or words:max=SIZE, chars likewise.
      pieces: gives the training text as `text_pieces`; called only where something is learnt.

    Raises:
      UserError: an unknown or ill-formed spec, or text that is not UTF-8.
    """
    return _parse(spec)(pieces)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote.

    Raises:
      UserError: no tokenizer there, or one that cannot be read.
    """
    folder = epath.Path(directory)
    try:
        spec = json.loads((folder / "tokenizer_config.json").read_text())["tokenizer"]
        if spec == "bytes":
            return BytesTokenizer()
        if spec.startswith("bpe:"):
            import tokenizers

            return BPETokenizer(
                spec, tokenizers.Tokenizer.from_str((folder / "tokenizer.json").read_bytes().decode())
            )
        if spec.startswith("chars"):
            return CharactersTokenizer(spec, json.loads((folder / "characters.json").read_text()))
        return WordsTokenizer(spec, (folder / "vocab.txt").read_bytes().decode().split("\n")[:-1])
    except FileNotFoundError as error:
        raise UserError(
            f"no tokenizer in {directory}: {error.filename or 'tokenizer_config.json'} is missing"
        ) from error
    except Exception as error:  # damaged files fail in whatever way their parser does
        raise UserError(f"the tokenizer in {directory} cannot be read: {error}") from error
