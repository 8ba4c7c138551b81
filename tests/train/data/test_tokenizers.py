"""Tokenizers: round trips, and byte counts that add up to the text for every tokenizer."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.tokenizers.named import load_tokenizer, train_tokenizer
from train.data.tokenizers.pieces import text_pieces
from train.engine.errors import UserError

SPECS = ("bytes", "bpe:300", "words", "words:2", "words:max=8", "chars", "chars:max=8")
TEXT = " the cat sat on the mat , the dog did not \n \n the café was on the mat \n" * 3
# Letters, several widths of blanks, line endings, characters of two to four bytes, the markers themselves.
TEXTS = st.lists(
    st.sampled_from([*" \t\n\u3000🙂\0", "  ", "\r\n", "the", "cat", "été", "zebra", "<unk>", "<eos>"]),
    max_size=60,
).map("".join)
WIKITEXT = Path("../shared/data/wikitext2")


def make(spec, text=TEXT):
    return train_tokenizer(spec, lambda: text_pieces([text.encode()]))


def encoded(tokenizer, pieces):
    """All tokens, and how many bytes of text each one covers."""
    ids, sizes = [], []
    for piece_ids, extra, _ in tokenizer.encode_corpus(pieces):
        size = tokenizer.token_bytes[piece_ids].copy()
        size[extra[:, 0]] += extra[:, 1]
        ids.append(piece_ids.astype(np.int64))
        sizes.append(size)
    return np.concatenate(ids or [[]]), np.concatenate(sizes or [[]])


@given(text=TEXTS, piece=st.integers(8, 40))
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_of_a_corpus_add_up_whatever_the_pieces(spec, text, piece):
    text += "\n"
    tokenizer = TOKENIZERS[spec]
    pieces = list(text_pieces([text.encode()], piece))
    assert b"".join(pieces) == text.encode()
    ids, sizes = encoded(tokenizer, pieces)
    assert sizes.sum() == len(text.encode())
    assert ids.max() < tokenizer.vocab_size
    if spec in ("bytes", "bpe:300"):
        assert tokenizer.decode(ids) == tokenizer.decode(tokenizer.encode(text)) == text


@given(text=TEXTS)
@settings(max_examples=80, deadline=None)
@pytest.mark.parametrize("spec", ["words", "words:max=8"])
def test_words_know_the_bytes_of_every_word_and_line(spec, text):
    tokenizer = TOKENIZERS[spec]
    text += "\n"
    ids, sizes = encoded(tokenizer, [text.encode()])
    at = 0
    for line in text.split("\n")[:-1]:
        words = line.split()
        assert [tokenizer.decode([i]) for i in ids[at : at + len(words)]] == [
            w if w in tokenizer._ids else "<unk>" for w in words
        ]
        assert sizes[at : at + len(words)].tolist() == [len(w.encode()) + 1 for w in words]
        assert tokenizer.decode([ids[at + len(words)]]) == "\n"
        assert sizes[at : at + len(words) + 1].sum() == len(line.encode()) + 1
        at += len(words) + 1
    assert at == len(ids)


TOKENIZERS = {spec: make(spec) for spec in (*SPECS, "bpe-uncased:300")}


def test_words_round_trip_and_vocabulary():
    words = TOKENIZERS["words"]
    assert words.decode(words.encode("the cat\n\non the mat\n")) == "the cat\n\non the mat\n"
    assert words.encode("the <unk> cat").tolist().count(words.encode("<unk>")[0]) == 1
    # The text repeats " the cat ..." three times, so a minimum count of 2 removes nothing but a size does.
    assert TOKENIZERS["words:2"].vocab_size == words.vocab_size
    assert TOKENIZERS["words:max=8"].vocab_size == 8
    assert make("words:4").vocab_size == 2 + 3  # the, mat, on
    assert [words.decode([i]) for i in range(3)] == ["<unk>", "\n", "the"]


def test_characters_round_trip_and_vocabulary():
    chars = TOKENIZERS["chars"]
    assert chars.decode(chars.encode(TEXT)) == TEXT
    assert chars.vocab_size == len(set(TEXT)) + 1
    assert [chars.decode([i]) for i in range(3)] == ["\ufffd", " ", "t"]  # by frequency
    assert TOKENIZERS["chars:max=8"].vocab_size == 8
    assert make("chars:4", "abbb" * 3 + "cc").vocab_size == 2
    ids, sizes = encoded(chars, ["z é 🙂".encode()])
    assert chars.decode(ids) == "\ufffd é \ufffd"
    assert sizes.tolist() == [1, 1, 2, 1, 4]


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        (
            "words",
            "the zebra sat the Ünknown zebra",
            r"2 words outside the vocabulary of \d+: 'zebra', 'Ünknown'",
        ),
        ("chars", "the z 🙂z", r"2 characters outside the vocabulary of \d+: 'z', '🙂'"),
        ("bpe:300", "a\udcff", "not UTF-8"),
    ],
)
def test_prompts_of_what_a_vocabulary_lacks_are_refused(spec, text, message):
    with pytest.raises(UserError, match=message):
        TOKENIZERS[spec].encode(text)


def test_bytes_that_are_no_text():
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.decode([0xC3, 0x28]) == "�("
    # The shell passes undecodable bytes as surrogates.
    assert tokenizer.encode(os.fsdecode(b"a\xff")).tolist() == [97, 255]
    for spec in ("bpe:300", "words", "chars"):
        with pytest.raises(UserError, match=r"not UTF-8.*--tokenizer bytes"):
            list(TOKENIZERS[spec].encode_corpus([b"caf\xe9 \n"]))


def test_bpe_merges_and_is_the_same_again():
    bpe = TOKENIZERS["bpe:300"]
    assert len(bpe.encode(TEXT)) < len(TEXT) // 2
    assert bpe.vocab_size <= 300
    assert make("bpe:300").digest == bpe.digest
    assert make("bpe:280").digest != bpe.digest


def test_uncased_has_one_form_of_each_word_and_counts_every_byte():
    """Whether or not it starts the sentence, has an accent, or has a blank before its punctuation."""
    text = " The cat sat , didn't it ? \n It did . \n" * 20
    uncased = make("bpe-uncased:300", text)
    plain = uncased.encode("it did . the cat sat, didn't it?")
    np.testing.assert_array_equal(uncased.encode("It díd.\n\tThe CAT sat , didn 't it ?"), plain)
    assert len(plain) == 12  # one for each word and punctuation mark
    assert uncased.encode("cat")[0] not in uncased.encode("concat")
    assert uncased.decode(uncased.encode("The cat 猫 sat")) == " the cat 猫 sat"
    assert encoded(uncased, [text.encode()])[1].sum() == len(text)
    assert make("bpe-uncased:300", text).digest == uncased.digest


@pytest.mark.parametrize("spec", TOKENIZERS)
def test_saved_and_loaded_it_is_the_same(spec, tmp_path):
    TOKENIZERS[spec].save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert loaded.spec == spec
    assert loaded.digest == TOKENIZERS[spec].digest
    pair = [list(encoded(t, [b"the mat\n"])[0]) for t in (loaded, TOKENIZERS[spec])]
    assert pair[0] == pair[1]
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]


def test_a_copy_has_the_same_tokens(tmp_path):
    """`eval.export` adds fields to tokenizer_config.json, and a run names the copy by its path."""
    learnt = make("bpe:300")
    learnt.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **json.loads(path.read_text())})
    )
    copy = train_tokenizer(f"{tmp_path}/tokenizer.json", lambda: [])
    assert copy.digest != learnt.digest
    assert copy.equals(learnt)
    assert not copy.equals(make("bpe:300", "another text of other words"))
    assert not make("bytes").equals(make("words"))
    assert make("words:2").equals(make("words:2"))


def test_a_tokenizer_out_of_reach_names_one_of_its_size(monkeypatch):
    """The line for presets that take GPT-2's tokenizer, on a machine without the hub."""

    class Offline:
        @staticmethod
        def from_pretrained(name):
            raise FileNotFoundError(f"{name} is not in the cache")

    monkeypatch.setattr(tokenizers, "Tokenizer", Offline)
    with pytest.raises(
        UserError, match=r"--tokenizer hf:gpt2: cannot be read \(--tokenizer bpe:50257 learns .*not in"
    ):
        train_tokenizer("hf:gpt2", lambda: [])


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    TOKENIZERS["bpe:300"].save(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_dtype_is_the_smallest():
    assert TOKENIZERS["bytes"].dtype == np.uint8
    assert TOKENIZERS["bpe:300"].dtype == np.uint16
    many = make("words", " ".join(f"w{i}" for i in range(70_000)) + "\n")
    assert many.dtype == np.int32
    ids, _ = encoded(many, [b"w69999 w3\n"])
    assert many.decode(ids) == "w69999 w3\n"


def test_pieces_end_with_a_line_a_blank_or_a_character():
    assert list(text_pieces([b"abc\nde", b"f\nghijk lmnopq", b"rst"], 10)) == [
        b"abc\ndef\n",
        b"ghijk ",
        b"lmnopqrst",
    ]
    pieces = list(text_pieces(["aé🙂".encode() * 9], 10))
    assert "".join(p.decode() for p in pieces) == "aé🙂" * 9
    assert max(map(len, pieces)) <= 10


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="WikiText-2 is not next to the checkout")
def test_wikitext_2_has_the_published_counts():
    import gzip

    text = gzip.decompress((WIKITEXT / "wiki.train.tokens.gz").read_bytes())
    words = train_tokenizer("words", lambda: text_pieces([text]))
    ids, sizes = encoded(words, text_pieces([text]))
    assert words.vocab_size == 33_278
    assert len(ids) == 2_088_628
    assert sizes.sum() == len(text)


def _file(model, tmp_path, **parts):
    """The specification of a tokenizer.json that holds this model."""
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "model",
    [
        lambda: tokenizers.models.WordLevel({"[UNK]": 0, "a": 5, "b": 300}, unk_token="[UNK]"),
        lambda: tokenizers.models.WordPiece({"[UNK]": 0, "a": 5, "b": 300}, unk_token="[UNK]"),
        lambda: tokenizers.models.BPE({"a": 5, "b": 300}, []),
    ],
    ids=["WordLevel", "WordPiece", "BPE"],
)
def test_ids_with_gaps(model, tmp_path):
    spec = _file(model(), tmp_path, pre_tokenizer=tokenizers.pre_tokenizers.Whitespace())
    tokenizer = train_tokenizer(spec, lambda: [])
    assert tokenizer.vocab_size == 301
    (encoded,) = tokenizer.encode_corpus([b"a b a"])
    assert encoded.ids.tolist() == [5, 300, 5]
    assert int(tokenizer.token_bytes[encoded.ids].sum() + encoded.extra[:, 1].sum()) == 5


def unigram(tokens):
    return tokenizers.models.Unigram([(token, -1.0) for token in tokens], 0, False)


@pytest.mark.parametrize(
    ("model", "text", "sizes"),
    [
        (lambda: unigram("日本語"), "日本語", [3, 3, 3]),
        (lambda: unigram(["<0x0A>", "\u2581日", "本"]), "\u2581日本", [4, 3]),
        (
            lambda: tokenizers.models.WordPiece({"[UNK]": 0, "un": 1, "##able": 2}, unk_token="[UNK]"),
            "unable",
            [2, 4],
        ),
    ],
    ids=["characters", "blanks and bytes", "word pieces"],
)
def test_bytes_of_a_cut_text_that_is_not_byte_level(model, text, sizes, tmp_path):
    """A token counts the bytes of its text, not its characters."""
    tokenizer = train_tokenizer(_file(model(), tmp_path), lambda: [])
    assert tokenizer.token_bytes[tokenizer.encode(text)].tolist() == sizes
    if "\u2581" in text:
        assert tokenizer.token_bytes[0] == 1  # of <0x0A>


def test_special_tokens_of_a_text_are_read_or_plain(tmp_path):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<|end|>"])
    model.save(str(path))
    tokenizer, plain = (train_tokenizer(f"{prefix}{path}", lambda: []) for prefix in ("", "plain:"))
    assert tokenizer.encode("a <|end|> b").tolist() == [0, 3, 1]
    assert tokenizer.decode(tokenizer.encode("a <|end|> b")) == "a <|end|> b"
    assert tokenizer.description == f"{path} (special tokens in the text: <|end|>)"
    plain.save(tmp_path / "run")
    for same in (plain, type(plain).load(plain.spec, epath.Path(tmp_path / "run"))):
        assert same.encode("a <|end|> b").tolist() == [0, 2, 1]
        assert same.description == same.spec == f"plain:{path}"
    assert tokenizer.digest != plain.digest
    with pytest.raises(
        UserError, match=r"SentencePiece reads no special tokens in a text; expected x\.model"
    ):
        train_tokenizer("plain:x.model", lambda: [])
