"""Tokenizers that others have trained: a tokenizer.json, a SentencePiece model, or one of the Hugging Face hub."""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import Int

from brl_jax.json_files import check_regular, read_json
from train.data.tokenizers.base import CONFIG, NO_EXTRA, Encoded, Tokenizer, check_utf8
from train.data.tokenizers.chat import ChatTemplate, template_of
from train.data.tokenizers.pieces import decode_piece, piece_batches
from train.engine.errors import UserError, one_line

_JSON, _SENTENCEPIECE = "tokenizer.json", "sentencepiece.model.base64"
_MOST_TOKENS = 1 << 24
# The fields of tokenizer_config.json that `Tokenizer.save` writes.
_OURS = {"tokenizer", "digest", "vocab_size"}

# Before the name of a tokenizer.json: names of special tokens in a text are text.
_PLAIN = "plain:"

#: The sizes of the vocabularies that presets name, so that a run can be planned without the hub.
PUBLISHED_SIZES = {"hf:gpt2": 50257, "hf:FacebookAI/roberta-base": 50265}


def is_pretrained(spec: str) -> bool:
    """Whether the command line names a tokenizer that exists, and not one to be learnt."""
    return spec.removeprefix(_PLAIN).startswith("hf:") or spec.endswith((".json", ".model"))


def _piece_size(token: str) -> int:
    """Bytes of a SentencePiece token: <0x0A> is one byte, and \u2581 marks a blank."""
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.replace("\u2581", " ").encode())


def _token_sizes(vocabulary: Mapping[str, int], description: Any) -> list[int]:
    """Bytes of each id's token in a tokenizer.json; 0 for an id without a token."""
    prefix = description["model"].get("continuing_subword_prefix") or ""
    most = max(vocabulary.values(), default=-1)
    if most >= _MOST_TOKENS:
        raise ValueError(f"its ids go up to {most}; expected fewer than {_MOST_TOKENS}")
    # Each character of the byte-level alphabet is one byte.
    is_byte_level = '"ByteLevel"' in json.dumps(
        [description.get(part) for part in ("pre_tokenizer", "decoder")]
    )
    sizes = [0] * (most + 1)
    for token, number in vocabulary.items():
        sizes[number] = len(token) if is_byte_level else _piece_size(token.removeprefix(prefix))
    return sizes


def _config_in(folder: epath.Path) -> dict[str, str]:
    """What transformers keeps of a tokenizer next to its vocabulary, as a payload: the names of special tokens and the
    template of chats."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):
        if (folder / name).exists():
            values |= read_json(folder / name, dict)
    if (folder / "chat_template.jinja").exists():
        values["chat_template"] = (folder / "chat_template.jinja").read_bytes().decode()
    values = {name: value for name, value in values.items() if name not in _OURS}
    return {CONFIG: json.dumps(values, sort_keys=True)} if values else {}


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
            self._model.encode_special_tokens = spec.startswith(_PLAIN)
            self._model.no_truncation()
            self._model.no_padding()
            sizes = _token_sizes(self._model.get_vocab(with_added_tokens=True), json.loads(payload[_JSON]))
        else:
            import sentencepiece

            content = base64.b64decode(payload[_SENTENCEPIECE])
            self._model = sentencepiece.SentencePieceProcessor(model_file=None, model_proto=content)
            pieces = map(self._model.id_to_piece, range(self._model.get_piece_size()))
            sizes = [_piece_size(piece) for piece in pieces]
        self.token_bytes = np.array(sizes, np.int64)

    @classmethod
    def open(cls, spec: str) -> PretrainedTokenizer:
        """Reads the tokenizer that `spec` names: a path, or hf:NAME."""
        name = spec.removeprefix(_PLAIN)
        if name != spec and name.endswith(".model"):
            raise UserError(
                f"--tokenizer {spec}: SentencePiece reads no special tokens in a text; expected {name}"
            )
        try:
            if name.startswith("hf:"):
                import tokenizers

                return cls(spec, {_JSON: tokenizers.Tokenizer.from_pretrained(name[3:]).to_str()})
            check_regular(Path(name).expanduser())
            path = epath.Path(name).expanduser()
            content, config = path.read_bytes(), _config_in(path.parent)
            if name.endswith(".json"):
                return cls(spec, {_JSON: content.decode()} | config)
            return cls(spec, {_SENTENCEPIECE: base64.b64encode(content).decode()} | config)
        except ModuleNotFoundError as error:
            raise UserError(f"--tokenizer {spec}: needs {error.name}: pip install -e '.[data]'") from error
        except Exception as error:  # the libraries raise all kinds of errors about the hub, files and formats
            if isinstance(error, FileNotFoundError) and not name.startswith("hf:"):
                raise UserError(f"--tokenizer: there is no file {name}") from error
            hint = ""
            if spec in PUBLISHED_SIZES:
                hint = f" (--tokenizer bpe:{PUBLISHED_SIZES[spec]} learns a vocabulary of this size from the text)"
            raise UserError(f"--tokenizer {spec}: cannot be read{hint}: {one_line(error)}") from error

    @property
    def description(self) -> str:
        added = json.loads(self._files.get(_JSON, "{}")).get("added_tokens") or []
        names = [token["content"] for token in added if token["special"]]
        if not names or self.spec.startswith(_PLAIN):
            return self.spec
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{self.spec} (special tokens in the text: {', '.join(names[:3])}{more})"

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:  # type: ignore[override]
        return template_of(json.loads(self._files.get(CONFIG, "{}")))

    @classmethod
    def load(cls, spec: str, folder: epath.Path) -> PretrainedTokenizer:
        """Reads what `save` wrote."""
        name = _JSON if (folder / _JSON).exists() else _SENTENCEPIECE
        return cls(spec, {name: (folder / name).read_bytes().decode()} | _config_in(folder))

    def encode(self, text: str) -> Int[np.ndarray, " length"]:
        check_utf8(text)
        return np.array(self._encode([text])[0], np.int32)

    def decode(self, ids: Sequence[int] | Int[np.ndarray, " length"]) -> str:
        # `encode` reads the names of special tokens, such as <|endoftext|>, so decoding writes them.
        options = {"skip_special_tokens": False} if _JSON in self._files else {}
        return self._model.decode(np.asarray(ids).tolist(), **options)

    def encode_corpus(self, pieces: Iterable[bytes]) -> Iterator[Encoded]:
        left = 0  # bytes that no token counts yet
        for batch in piece_batches(pieces):
            encodings = self._encode([decode_piece(piece) for piece in batch])
            for piece, ids in zip(batch, encodings, strict=True):
                tokens, extra = np.array(ids, self.dtype), NO_EXTRA
                left += len(piece) - int(self.token_bytes[tokens].sum())
                if left and len(tokens):
                    extra, left = np.array([[len(tokens) - 1, left]], np.int64), 0
                yield Encoded(tokens, extra, piece)

    def _encode(self, texts: list[str]) -> list[Sequence[int]]:
        if _JSON in self._files:
            encoded = self._model.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encoded]
        return self._model.encode(texts)

    def _payload(self) -> dict[str, str]:
        return dict(self._files)
