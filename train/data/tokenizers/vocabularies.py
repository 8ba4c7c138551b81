"""Tokenizers whose tokens are the words, or the characters, of the training text."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from train.data.tokenizers.base import Encoded, Tokenizer
from train.data.tokenizers.pieces import decode_piece
from train.engine.errors import UserError

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
UNKNOWN_CHARACTER = "\ufffd"


def _frequent(texts: Iterable[Iterable[str]], marks: list[str], min_count: int) -> list[str]:
    """The marks, and then what the texts have at least `min_count` times, the most frequent first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    kept = [each for each, count in counts.items() if count >= min_count and each not in marks]
    return [*marks, *sorted(kept, key=lambda each: (-counts[each], each))]


def _refuse(found: Iterable[str], kind: str, size: int) -> None:
    """Raises UserError if some words or characters of a text are not in the vocabulary."""
    unknown = list(dict.fromkeys(found))
    if unknown:
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        raise UserError(
            f"text has {len(unknown)} {kind} outside the vocabulary of {size}: {shown}; "
            f"expected {kind} of the training text"
        )


class CharactersTokenizer(Tokenizer):
    """The characters of the training text, and U+FFFD for all others (as in arXiv:2509.07963, section 5.1)."""

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
        return cls(spec, _frequent(map(decode_piece, pieces), [UNKNOWN_CHARACTER], min_count)[:size])

    def _find(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The token of each character, and whether that token is the character's own."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")
        places = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        known = self._codes[places] == codes
        return np.where(known, self._order[places], self._unknown).astype(np.int32), known

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        ids, known = self._find(text)
        _refuse((text[i] for i in np.flatnonzero(~known)), "characters", self.vocab_size)
        return ids

    def encode_example(self, text: str) -> Int[np.ndarray, " length"]:
        return self._find(text)[0]

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        return "".join(self._characters[i] for i in np.asarray(ids).tolist())

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        for piece in pieces:
            text = decode_piece(piece)
            ids, known = self._find(text)
            unknown = np.flatnonzero(~known)
            sizes = np.array([len(text[i].encode()) for i in unknown], np.int64)
            extra = np.stack([unknown, sizes - self.token_bytes[self._unknown]], 1)
            yield Encoded(ids.astype(self.dtype), extra, piece)

    def _payload(self) -> dict[str, str]:
        return {"characters.json": json.dumps(self._characters) + "\n"}


class WordsTokenizer(Tokenizer):
    """Words between blanks, `<eos>` at the end of each line, `<unk>` for words outside the vocabulary.

    As in WikiText (Merity et al. 2016, arXiv:1609.07843). A run of blanks counts as one blank. token_bytes counts a
    word and the blank after it; the remaining bytes of a line belong to its `<eos>`.

    A dictionary looks the words up, not the tokenizers library's WordLevel: the tokens are the same, but the words
    themselves are needed to count the bytes of those outside the vocabulary, and on 25 MB of text with 50,000 words the
    library takes 18 s and the dictionary 2.5 s.
    """

    def __init__(self, spec: str, words: Sequence[str]):
        self.spec = spec
        self._words = list(words)
        self._unknown, self._end = self._words.index(UNKNOWN), self._words.index(END_OF_LINE)
        self._ids = {word: i for i, word in enumerate(self._words)}
        del self._ids[END_OF_LINE]  # the word "<eos>" in a text is not the end of a line
        self._ids["\n"] = self._end
        self.token_bytes = np.array([len(w.encode()) + 1 for w in self._words], np.int64)
        self.token_bytes[self._end] = 0

    @classmethod
    def train(cls, spec: str, pieces: Iterable[bytes], min_count: int, size: int | None) -> WordsTokenizer:
        """Keeps the words seen `min_count` times, the `size` most frequent with the two marks included."""
        texts = (decode_piece(piece).split() for piece in pieces)
        return cls(spec, _frequent(texts, [UNKNOWN, END_OF_LINE], min_count)[:size])

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        words = _words(text)
        _refuse((word for word in words if word not in self._ids), "words", self.vocab_size)
        return np.array([self._ids[w] for w in words], np.int32)

    def encode_example(self, text: str) -> Int[np.ndarray, " length"]:
        return np.array([self._ids.get(word, self._unknown) for word in _words(text)], np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        text = " ".join("\n" if i == self._end else self._words[i] for i in np.asarray(ids).tolist())
        return re.sub(" ?\n ?", "\n", text)

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        open_line = 0  # bytes of the incomplete line that no token counts yet
        for piece in pieces:
            words = _words(decode_piece(piece))
            found = map(self._ids.get, words, itertools.repeat(self._unknown))
            ids = np.fromiter(found, np.int64, len(words))
            sizes = self.token_bytes[ids]
            unknown = np.flatnonzero(ids == self._unknown)
            sizes[unknown] = [len(words[i].encode()) + 1 for i in unknown]
            ends = np.flatnonzero(ids == self._end)
            line_ends = np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + 1
            spent = np.concatenate([[0], np.cumsum(sizes)])
            # The bytes of the lines so far minus those that their words count.
            surplus = open_line + line_ends - spent[ends]
            sizes[ends] = np.diff(surplus, prepend=0)
            open_line += len(piece) - int(sizes.sum())
            changed = np.flatnonzero(sizes != self.token_bytes[ids])
            extra = np.stack([changed, (sizes - self.token_bytes[ids])[changed]], 1)
            yield Encoded(ids.astype(self.dtype), extra, piece)

    def _payload(self) -> dict[str, str]:
        return {"vocab.txt": "".join(w + "\n" for w in self._words)}


def _words(text: str) -> list[str]:
    """The words of the lines, and a line end after each complete line."""
    words: list[str] = []
    for i, line in enumerate(text.split("\n")):
        if i:
            words.append("\n")
        words += line.split()
    return words
