"""Tokenizers that others have trained: a tokenizer.json, a SentencePiece model, or one of the Hugging Face hub."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Int

from brl_jax.json_files import check_regular
from train.data.splits import DocumentStart
from train.data.tokenizers.base import NO_EXTRA, Encoded, Tokenizer, check_utf8, decode_piece, piece_batches
from train.engine.errors import UserError, one_line

_JSON, _SENTENCEPIECE = "tokenizer.json", "sentencepiece.model.base64"


def is_pretrained(spec: str) -> bool:
    """Whether the command line names a tokenizer that exists, and not one to be learnt."""
    return spec.startswith("hf:") or spec.endswith((".json", ".model"))


class PretrainedTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library or of SentencePiece, which keeps its special tokens and adds none to a
    text.

    Such tokenizers may change the text, so that the bytes of a token are known only together: `token_bytes` is the size
    of the token's own text, and the rest of a document, or of its pieces of 64 KiB, is counted at its last token.
    """

    def __init__(self, spec: str, payload: dict[str, str]):
        self.spec, self._files = spec, payload
        self._model: Any
        if _JSON in payload:
            import tokenizers

            self._model = tokenizers.Tokenizer.from_str(payload[_JSON])
            self._model.no_truncation()
            self._model.no_padding()
            tokens = [self._model.id_to_token(i) or "" for i in range(self._model.get_vocab_size())]
        else:
            import sentencepiece

            content = base64.b64decode(payload[_SENTENCEPIECE])
            self._model = sentencepiece.SentencePieceProcessor(model_file=None, model_proto=content)
            tokens = [self._model.id_to_piece(i) for i in range(self._model.get_piece_size())]
        self.token_bytes = np.array([len(token) for token in tokens], np.int64)

    @classmethod
    def open(cls, spec: str) -> PretrainedTokenizer:
        """Reads the tokenizer that `spec` names: a path, or hf:NAME.

        Raises:
          UserError: it does not exist, cannot be read, or a package is not installed.
        """
        try:
            if spec.startswith("hf:"):
                import tokenizers

                return cls(spec, {_JSON: tokenizers.Tokenizer.from_pretrained(spec[3:]).to_str()})
            check_regular(Path(spec).expanduser())
            content = epath.Path(spec).expanduser().read_bytes()
            if spec.endswith(".json"):
                return cls(spec, {_JSON: content.decode()})
            return cls(spec, {_SENTENCEPIECE: base64.b64encode(content).decode()})
        except ModuleNotFoundError as error:
            raise UserError(f"--tokenizer {spec}: needs {error.name}: pip install -e '.[data]'") from error
        except FileNotFoundError as error:
            raise UserError(f"--tokenizer: there is no file {spec}") from error
        except Exception as error:  # the libraries raise all kinds of errors about the hub, files and formats
            raise UserError(f"--tokenizer {spec}: cannot be read: {one_line(error)}") from error

    @classmethod
    def load(cls, spec: str, folder: epath.Path) -> PretrainedTokenizer:
        """Reads what `save` wrote."""
        name = _JSON if (folder / _JSON).exists() else _SENTENCEPIECE
        return cls(spec, {name: (folder / name).read_bytes().decode()})

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        check_utf8(text)
        return np.array(self._encode([text])[0], np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        return self._model.decode(np.asarray(ids).tolist())

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        left = 0  # bytes that no token counts yet
        for batch in piece_batches(pieces):
            encodings = self._encode([decode_piece(piece) for piece in batch])
            for piece, ids in zip(batch, encodings, strict=True):
                tokens, extra = np.array(ids, self.dtype), NO_EXTRA
                left += len(piece) - int(self.token_bytes[tokens].sum())
                if left and len(tokens):
                    extra, left = np.array([[len(tokens) - 1, left]], np.int64), 0
                yield Encoded(tokens, extra, isinstance(piece, DocumentStart))

    def _encode(self, texts: list[str]) -> list[Sequence[int]]:
        if _JSON in self._files:
            encoded = self._model.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]
        return self._model.encode(texts)

    def _payload(self) -> dict[str, str]:
        return self._files
