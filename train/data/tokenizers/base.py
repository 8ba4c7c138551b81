"""What every tokenizer is."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath
from jaxtyping import Int

from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.pieces import DocumentStart
from train.engine.errors import UserError
from train.engine.storage import digest, write_whole

CONFIG = "tokenizer_config.json"
NO_EXTRA = np.zeros((0, 2), np.int64)


class Encoded(NamedTuple):
    """Tokens of a piece of text, and the places where a token encodes another number of bytes than `token_bytes` says.

    ids: (n,) integers. extra: (k, 2) int64, rows (index in ids, bytes of the text beyond token_bytes[id]).
    piece: the text, see `text_pieces`.
    """

    ids: np.ndarray
    extra: np.ndarray
    piece: bytes

    @property
    def starts(self) -> bool:
        """Whether a document starts with this piece."""
        return isinstance(self.piece, DocumentStart)


class Tokenizer(abc.ABC):
    """Text to integers in [0, vocab_size) and back.

    spec: its name on the command line. token_bytes: (vocab_size,) int64, the bytes of text that each token usually
    encodes.
    """

    spec: str
    token_bytes: Int[np.ndarray, " vocab"]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self.token_bytes)

    @property
    def description(self) -> str:
        """Its name, and which names in a text it reads as special tokens."""
        return self.spec

    @property
    def chat_template(self) -> ChatTemplate | None:
        """How its model writes chats, if it has a way."""
        return None

    @property
    def dtype(self) -> np.dtype:
        """The smallest of uint8, uint16 and int32 that holds every token."""
        size = self.vocab_size
        return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32)

    @property
    def digest(self) -> str:
        """Hash of everything that the encoding of a text depends on."""
        return digest(self.spec, self._payload())

    def equals(self, other: Tokenizer) -> bool:
        """Whether another tokenizer has the same tokens. It may have another name, as the path of a copy, and other
        fields in CONFIG, as in an export."""
        mine, theirs = (
            {name: text for name, text in each._payload().items() if name != CONFIG} for each in (self, other)
        )
        return mine == theirs

    @abc.abstractmethod
    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        """Tokens of `text`, (length,) int32. Raises UserError if a part of the text has no token."""

    def encode_example(self, text: str) -> Int[np.ndarray, " length"]:
        """Tokens of a text of a data set, (length,) int32: unknown words and characters have a token too.

        Raises UserError if a part of the text has no token and the tokenizer has none for unknown ones.
        """
        return self.encode(text)

    @abc.abstractmethod
    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        """Text of the tokens; bytes that are not UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        """Tokens of a long text given as `text_pieces`, a piece at a time; unknown words have a token too. No token has
        text of two parts or documents.

        Raises UserError if the text is not UTF-8 (bytes: never).
        """

    def _payload(self) -> dict[str, str]:
        """Files, by name, that `load_tokenizer` needs in addition to the spec. Of `CONFIG` they are more fields."""
        return {}

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes tokenizer_config.json and the files that it needs (bpe: tokenizer.json, words: vocab.txt, chars:
        characters.json).

        Each file is written under another name and renamed; the configuration comes last, so that a folder that has it
        is whole.
        """
        folder = epath.Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        files = self._payload()
        config = json.loads(files.pop(CONFIG, "{}"))
        config |= {"tokenizer": self.spec, "digest": self.digest, "vocab_size": self.vocab_size}
        for name, text in (*files.items(), (CONFIG, json.dumps(config) + "\n")):
            write_whole(folder / name, text)


def check_utf8(text: str) -> None:
    """Raises UserError for a text with bytes that the command line could not decode, or with half a surrogate pair."""
    if not text.isascii() and text.encode(errors="replace").decode() != text:
        raise UserError(
            f"text is not UTF-8: {text!r}; expected text that is, or a model with --tokenizer bytes"
        )


def encode_given(tokenizer: Tokenizer, text: str, place: str) -> Int[np.ndarray, " length"]:
    """The tokens of a text that a user gives, at least one. Raises UserError, which begins with the text's place."""
    try:
        tokens = tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    if not len(tokens):
        raise UserError(f"{place}: expected at least one token of text, got {text!r}")
    return tokens


def continuation(tokenizer: Tokenizer, prompt: Int[np.ndarray, " P"], tokens: Int[np.ndarray, " T"]) -> str:
    """The text that tokens add to a prompt.

    Both are decoded together, because a tokenizer may join words by what stands before them, and a character may begin
    in the prompt.
    """
    before = tokenizer.decode(np.asarray(prompt))
    whole = tokenizer.decode(np.concatenate([prompt, tokens]).astype(np.int32))
    same = next((i for i, (a, b) in enumerate(zip(before, whole)) if a != b), min(len(before), len(whole)))
    return whole[same:]
