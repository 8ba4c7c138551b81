"""Tokenizers by name: bytes, characters, byte-level BPE and words, behind one interface that also counts
the text's bytes."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from etils import epath
from jaxtyping import Int

from brl_jax.fields import MOST
from brl_jax.json_files import read_json
from train.data.tokenizers.base import NO_EXTRA, Encoded, Tokenizer
from train.data.tokenizers.pieces import decode_piece
from train.data.tokenizers.published import PretrainedTokenizer, is_pretrained
from train.data.tokenizers.vocabularies import CharactersTokenizer, WordsTokenizer
from train.engine.errors import UserError

_UNCASED = "bpe-uncased"
_EXPECTED = (
    "bytes, chars, chars:MIN_COUNT, chars:max=SIZE, bpe:SIZE, bpe-uncased:SIZE, words, words:MIN_COUNT, "
    "words:max=SIZE, a tokenizer.json or .model file, or hf:NAME (as hf:gpt2)"
)
# BPE learns from this much text at most: its merges settle long before, and the trainer keeps every
# distinct word in memory.
_TRAINING_BYTES = 1 << 29
_LARGEST = 1 << 24


class BytesTokenizer(Tokenizer):
    """The bytes of the text in UTF-8: 256 symbols, none unknown."""

    spec = "bytes"
    token_bytes = np.ones(256, np.int64)

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        # Bytes that the command line could not decode arrive as surrogates, one for each byte.
        return np.frombuffer(text.encode(errors="surrogateescape"), np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        return np.asarray(ids).astype(np.uint8).tobytes().decode(errors="replace")

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        for piece in pieces:
            yield Encoded(np.frombuffer(piece, np.uint8), NO_EXTRA, piece)


def _train_bpe(spec: str, size: int, pieces: Iterable[bytes]) -> PretrainedTokenizer:
    """Up to `size` byte pairs: Sennrich et al. 2016 (arXiv:1508.07909, algorithm 1) on bytes instead of characters, as
    in GPT-2, so that every text can be encoded and decoding restores it exactly.

    "bpe-uncased" has pairs of words, as in uncased BERT (arXiv:1810.04805): the text loses its case, its accents and
    the kinds of its blanks, and each punctuation mark is a word. A word therefore has the same form at the start of a
    sentence and inside it, whether or not there are blanks around the marks. The pieces are byte pairs and not
    WordPieces, because the library's trainer of WordPieces makes another vocabulary each time, and has no token for a
    character that it has not seen.
    """
    import tokenizers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    model.pre_tokenizer = byte_level(add_prefix_space=False)
    if spec.startswith(_UNCASED):
        model.normalizer = tokenizers.normalizers.BertNormalizer()
        # A blank in front of every word distinguishes its start from a piece inside.
        bytes_of_words = byte_level(add_prefix_space=True, use_regex=False)
        words = tokenizers.pre_tokenizers.BertPreTokenizer()
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, bytes_of_words])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    model.train_from_iterator(map(decode_piece, _head(pieces, _TRAINING_BYTES)), trainer)
    return PretrainedTokenizer(spec, {"tokenizer.json": model.to_str()})


def _head(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The first pieces, until they have `size` bytes."""
    for piece in pieces:
        yield piece
        size -= len(piece)
        if size <= 0:
            return


def check_tokenizer(spec: str) -> None:
    """Raises UserError unless `spec` is a tokenizer that `train_tokenizer` can make."""
    _parse(spec)


def _parse(spec: str) -> Callable[[Callable[[], Iterable[bytes]]], Tokenizer]:
    kind, colon, rest = spec.partition(":")
    if spec == "bytes":
        return lambda pieces: BytesTokenizer()
    if is_pretrained(spec):
        return lambda pieces: PretrainedTokenizer.open(spec)
    if kind in ("bpe", _UNCASED):
        if not rest.isdecimal() or not 256 < int(rest) <= _LARGEST:
            raise UserError(
                f"--tokenizer: {kind}:SIZE needs a whole number from 257 to {_LARGEST}, got {spec!r}"
            )
        return lambda pieces: _train_bpe(f"{kind}:{int(rest)}", int(rest), pieces())
    if kind in ("words", "chars"):
        learner, least = (WordsTokenizer, 3) if kind == "words" else (CharactersTokenizer, 2)
        match = re.fullmatch(r"(max=)?(\d+)", rest) if colon else None
        if colon and (match is None or not (least if match[1] else 1) <= int(match[2]) <= MOST):
            raise UserError(
                f"--tokenizer: {kind} takes a count of at least 1 ({kind}:3) "
                f"or a size of at least {least} ({kind}:max=50000), got {spec!r}"
            )
        number = int(match[2]) if match else 1
        limits = (
            {"min_count": 1, "size": number} if match and match[1] else {"min_count": number, "size": None}
        )
        return lambda pieces: learner.train(spec, pieces(), **limits)
    near = difflib.get_close_matches(kind.lower(), ["bytes", "chars", "bpe", _UNCASED, "words"], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"--tokenizer: unknown tokenizer {spec!r}, expected {_EXPECTED}{hint}")


def train_tokenizer(spec: str, pieces: Callable[[], Iterable[bytes]]) -> Tokenizer:
    """Makes the tokenizer that `spec` names; all but bytes learn their vocabulary from the pieces."""
    return _parse(spec)(pieces)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote."""
    folder = epath.Path(directory)
    fields = {"tokenizer": str, "digest": str, "vocab_size": int}
    try:
        config = read_json(folder / "tokenizer_config.json", fields)
        tokenizer = _read(config["tokenizer"], folder)
        if tokenizer.digest != config["digest"]:
            raise ValueError(
                f"its files are not those that were saved: the vocabulary had {config['vocab_size']} tokens, now it "
                f"has {tokenizer.vocab_size}"
            )
        return tokenizer
    except FileNotFoundError as error:
        raise UserError(
            f"no tokenizer in {directory}: {error.filename or 'tokenizer_config.json'} is missing"
        ) from error
    except Exception as error:  # the parsers of damaged files raise all kinds of errors
        raise UserError(f"the tokenizer in {directory} cannot be read: {error}") from error


def _read(spec: str, folder: epath.Path) -> Tokenizer:
    if spec == "bytes":
        return BytesTokenizer()
    if is_pretrained(spec) or spec.startswith("bpe"):
        return PretrainedTokenizer.load(spec, folder)
    if spec.startswith("chars"):
        return CharactersTokenizer(spec, read_json(folder / "characters.json", list[str]))
    return WordsTokenizer(spec, (folder / "vocab.txt").read_bytes().decode().split("\n")[:-1])
