"""Where documents start: in sources, corpora on disk, shards, mixtures and rows of batches."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from tests.support.texts import numbered, rows_of_json, write_splits
from train.data import documents as documents_module
from train.data import sources as sources_module
from train.data.dataset import DataConfig, load
from train.data.documents import check_documents, cut_documents
from train.data.mixture import SEGMENT_STEPS, MixedStreams, Mixture, joined
from train.data.streams import EvalStream, TokenStreams
from train.data.tokenizers.pieces import DocumentStart, text_pieces
from train.engine.errors import UserError
from train.tokenize import main as tokenize

WIKI = (
    " \n = First = \n \n words of it \n = not a title = \n \n = nor this = \n one \n \n = = A section = = \n more \n"
    " \n = Second é = \n \n text , x = 3 \n x = \n \n = Third = \n"
)
# Where the documents of WIKI start, found by hand; the first includes the empty line before it.
TITLES = (" \n = First", " = Second", " = Third")


def documents_of(blocks):
    """Joins the blocks of each document."""
    found = []
    for block in blocks:
        if isinstance(block, DocumentStart):
            found.append(b"")
        found[-1] += block
    return [document.decode() for document in found]


def parts_of(text, beginnings):
    """Cuts the text where each of `beginnings` occurs."""
    places = [text.index(each) for each in beginnings] + [len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(places)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_a_line_starts_a_document_wherever_blocks_are_cut(size):
    content = WIKI.encode()
    blocks = [content[i : i + size] for i in range(0, len(content), size)]
    first_line = check_documents("wikitext")
    assert documents_of(cut_documents(blocks, first_line=first_line, keep=False)) == parts_of(WIKI, TITLES)
    # The expression must match the whole line, whichever line ending it has.
    own = "ab\n# 1\nx # 2\n# 3\r\ny\n# 4"
    blocks = [own.encode()[i : i + size] for i in range(0, len(own), size)]
    found = documents_of(cut_documents(blocks, first_line=check_documents(r"# \d"), keep=False))
    assert found == ["ab\n", "# 1\nx # 2\n", "# 3\r\ny\n", "# 4"]


@pytest.mark.parametrize("size", [1, 3, 8, 20, 1000])
def test_long_lines_hide_no_first_line(monkeypatch, size):
    """A line too long to buffer hides no first line before or after it, and its own tail never counts as a first
    line."""
    monkeypatch.setattr(documents_module, "_LONGEST", 16)
    text = "# 1\n" + 50 * "a" + "\n# 2\n" + 34 * "b" + "# 3\n\n# 4\nc\n" + 40 * "d" + "\n# 5\n" + 20 * "e"
    blocks = [text.encode()[i : i + size] for i in range(0, len(text), size)]
    found = documents_of(cut_documents(blocks, first_line=check_documents(r"# \d"), keep=False))
    assert found == parts_of(text, ("# 1", "# 2", "# 4", "# 5"))


def test_a_file_starts_a_document_and_a_row_does_not():
    blocks = [DocumentStart(b"a\n = T = \n"), b"b\n\n = U = \n\n", DocumentStart(b"c\n\n"), b" = V = \n"]
    first_line = check_documents("wikitext")
    kept, replaced = (
        documents_of(cut_documents(blocks, first_line=first_line, keep=keep)) for keep in (True, False)
    )
    assert kept == ["a\n = T = \nb\n\n", " = U = \n\n", "c\n\n", " = V = \n"]
    assert replaced == ["a\n = T = \nb\n\n", " = U = \n\nc\n\n", " = V = \n"]


@pytest.mark.parametrize("size", [3, 10, 1000])
def test_no_piece_has_two_documents(size):
    blocks = [
        DocumentStart(b"abcdef\nghi"),
        b"jkl",
        DocumentStart(b"m\n"),
        DocumentStart(b""),
        DocumentStart(b"no"),
    ]
    pieces = list(text_pieces(blocks, size))
    assert documents_of(pieces) == ["abcdef\nghijkl", "m\n", "no"]
    assert max(map(len, pieces)) <= max(size, 13)


def novel(number):
    """A short text that begins and ends with blanks, which a tokenizer could merge across documents."""
    return (
        f"\n\n  Story {number} é.\n\n" + "".join(f"Line {i} of {number}.\n" for i in range(5 * number)) + "\n"
    )


@pytest.fixture
def novels(tmp_path):
    parts = {f"train-{number}": novel(number) for number in range(1, 8)}
    return write_splits(tmp_path / "novels", valid=novel(9), **parts)


@pytest.mark.parametrize("spec", ["bytes", "bpe:300", "bpe-uncased:300", "words", "chars"])
def test_a_corpus_knows_where_its_documents_start(novels, tmp_path, monkeypatch, spec):
    """The tokens between two starts encode exactly one document."""
    monkeypatch.setattr(sources_module, "_BLOCK", 37)
    tokenizer, corpora = load(DataConfig(data=novels, tokenizer=spec), tmp_path / "run")
    starts = corpora["train"].starts
    assert len(starts) == 7
    assert isinstance(starts.base, np.memmap)
    ends = [*starts[1:], len(corpora["train"].tokens)]
    for number, (start, end) in enumerate(zip(starts, ends), start=1):
        np.testing.assert_array_equal(corpora["train"].tokens[start:end], tokenizer.encode(novel(number)))
        assert corpora["train"].num_bytes(start, end) == len(novel(number).encode())
    assert corpora["valid"].starts.tolist() == [0]


def test_documents_without_tokens_are_dropped(tmp_path):
    """The tokenizer drops blanks, so some documents have no tokens; their bytes go to the next token."""
    texts = {
        "train-a": "one two\n",
        "train-b": " \n \n",
        "train-c": "three\n",
        "train-d": "\n",
        "valid": "four\n",
    }
    data = write_splits(tmp_path, **texts)
    tokenizer, corpora = load(DataConfig(data=data, tokenizer="bpe-uncased:300"), tmp_path / "run")
    corpus = corpora["train"]
    first = len(tokenizer.encode("one two\n"))
    assert corpus.starts.tolist() == [0, first]
    assert corpus.num_bytes(first) == len(" \n \nthree\n")


def test_rows_of_a_data_set_are_documents_until_lines_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = WIKI.removesuffix("\n").split("\n")
    rows_of_json(tmp_path / "set", {"train-0": lines, "validation-0": ["v", "w w"], "test-0": ["t"]})
    for kind in ("hf", "hf-stream"):
        _, corpora = load(DataConfig(data=f"{kind}:{tmp_path}/set"), tmp_path / kind)
        assert corpora["valid"].starts.tolist() == [0, 2]
        assert corpora["test"].starts.tolist() == [0]
    places = np.cumsum([0] + [len(line.encode()) + 1 for line in lines])
    _, corpora = load(DataConfig(data=f"hf:{tmp_path}/set"), tmp_path / "hf")
    np.testing.assert_array_equal(corpora["train"].starts, places[:-1])
    titled = DataConfig(data=f"hf:{tmp_path}/set", documents="wikitext")
    _, corpora = load(titled, tmp_path / "titled")
    expected = np.cumsum([0] + [len(part.encode()) for part in parts_of(WIKI, TITLES)])
    np.testing.assert_array_equal(corpora["train"].starts, expected[:-1])
    with pytest.raises(
        UserError, match=r"^--documents: the run in .* was started with 'wikitext', got 'records'"
    ):
        load(DataConfig(data=f"hf:{tmp_path}/set"), tmp_path / "titled")


@pytest.mark.slow
def test_shards_have_the_documents_of_the_text(novels, tmp_path):
    folder = tmp_path / "shards"
    line = f"--data {novels} --out {folder} --workers 1 --record 100".split()
    tokenize([*line, "--documents", r"Line 3 .*"])
    _, shards = load(DataConfig(data=f"tokens:{folder}"), tmp_path / "run")
    _, whole = load(DataConfig(data=novels, documents=r"Line 3 .*"), tmp_path / "other")
    assert len(whole["train"].starts) == 14
    for split in ("train", "valid"):
        np.testing.assert_array_equal(shards[split].starts, whole[split].starts)
    sizes = {"batch": 2, "length": 200, "segments": True}
    for a, b in zip(TokenStreams(shards["train"], **sizes), TokenStreams(whole["train"], **sizes)):
        np.testing.assert_array_equal(a["segment_ids"], b["segment_ids"])
        if b.reset and a["segment_ids"].any():
            break
    with pytest.raises(UserError, match=r"has no test text, only train, valid"):
        load(DataConfig(data=f"tokens:{folder}"), tmp_path / "third", ("test",))
    # A last document without tokens, which starts at the end, is ignored.
    summary = json.loads((folder / "train-00000.json").read_text())
    (folder / "train-00000.json").write_text(
        json.dumps(summary | {"starts": [*summary["starts"], summary["tokens"]]})
    )
    _, again = load(DataConfig(data=f"tokens:{folder}"), tmp_path / "run")
    np.testing.assert_array_equal(again["train"].starts, whole["train"].starts)
    del summary["starts"]
    (folder / "train-00000.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match=r"cannot be read: .*train-00000\.json: starts is missing"):
        load(DataConfig(data=f"tokens:{folder}"), tmp_path / "run")


def segments_by_hand(tokens, starts):
    """Numbers the documents in a row whose tokens are their positions."""
    ids = [0]
    for token in tokens[1:]:
        ids.append(ids[-1] + (token in starts))
    return ids


def test_rows_say_which_document_each_token_is_of():
    starts = [0, 1, 2, 9, 40, 41, 90]
    corpus = numbered(97, starts)
    stream = TokenStreams(corpus, batch=3, length=15, seed=4, segments=True)
    seen = 0
    for _, batch in zip(range(20), stream):
        for tokens, ids in zip(batch["tokens"], batch["segment_ids"]):
            assert ids.tolist() == segments_by_hand(tokens.tolist(), starts)
            seen += tokens[-1] < tokens[0]  # it wraps around
    assert seen
    held_out = EvalStream(corpus, batch=2, length=10, limit=88, segments=True)
    for batch in held_out:
        for tokens, ids, weights in zip(batch["tokens"], batch["segment_ids"], batch["weights"]):
            count = int(weights.sum())
            assert ids[:count].tolist() == segments_by_hand(tokens.tolist(), starts)[:count]
    plain = TokenStreams(corpus, batch=3, length=15, seed=4)
    with pytest.raises(UserError, match="input position is of documents None, now it is 7"):
        stream.set_state(plain.get_state())
    assert "segment_ids" not in next(plain).arrays


def test_mixed_rows_know_their_documents():
    first, second = numbered(700, [0, 5, 300]), numbered(500, [0, 123])
    stream = MixedStreams(Mixture((first, second), (0.5, 0.5)), batch=2, length=10, segments=True)
    for _, batch in zip(range(3 * SEGMENT_STEPS), stream):
        for tokens, ids in zip(batch["tokens"].tolist(), batch["segment_ids"].tolist()):
            assert ids in (segments_by_hand(tokens, [0, 5, 300]), segments_by_hand(tokens, [0, 123]))
    # Held-out texts alternate; a turn starts a document unless it continues the same text.
    other = numbered(5000, [0, 4500])
    both = joined(
        [numbered(5000, [0, 10]), dataclasses.replace(other, tokens=other.tokens + 10_000)], [0.5, 0.5]
    )
    jumps = np.flatnonzero(np.diff(both.tokens) != 1) + 1
    expected = {0, *jumps.tolist(), *np.flatnonzero(np.isin(both.tokens, [10, 14_500])).tolist()}
    assert both.starts.tolist() == sorted(expected)
