"""Files with a JSON object a line: their documents, and how much these count in the loss."""

import json

import numpy as np
import pytest

from train.data import DataConfig, load
from train.data.corpus import Corpus
from train.data.mixture import MixedStreams, Mixture, joined
from train.data.streams import EvalStream, TokenStreams
from train.engine.errors import UserError


def written(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return f"jsonl:{path}"


def corpora(data, folder, **options):
    return load(DataConfig(data=data, **options), folder, ("train", "valid"))[1]


@pytest.fixture
def weighted(tmp_path):
    """Documents "aaa", "bb", "c" and "dddd" with the weights 1, 0.5, 0 and 2, and the held-out "x" and "yy"."""
    lines = [
        {"text": "aaa\n"},
        {"text": "bb", "weight": 0.5},
        {"text": "c", "weight": 0},
        {"text": "dddd", "weight": 2},
    ]
    written(tmp_path / "train.jsonl", *lines)
    written(tmp_path / "valid.jsonl", {"text": "x", "weight": 0}, "\n", {"text": "yy", "weight": 7, "id": 3})
    return corpora(f"jsonl:{tmp_path}/*.jsonl", tmp_path / "run")


def test_documents_and_their_weights(weighted):
    corpus = weighted["train"]
    assert bytes(corpus.tokens) == b"aaa\nbb\nc\ndddd\n"
    assert corpus.starts.tolist() == [0, 4, 7, 9]
    expected = np.repeat([1.0, 0.5, 0.0, 2.0], [4, 3, 2, 5])
    np.testing.assert_array_equal(corpus.weights_at(np.arange(28)), np.tile(expected, 2))
    assert list(corpus.counted(0, 14)) == [(0, 4), (4, 7), (9, 14)]
    assert list(corpus.counted(5, 9)) == [(5, 7)]


def test_a_batch_has_the_weights_of_its_targets(weighted):
    corpus = weighted["train"]
    stream = TokenStreams(corpus, batch=2, length=3, seed=1)
    weight_of = dict(zip(b"abcd", (1.0, 0.5, 0.0, 2.0)))
    for _ in range(6):
        batch = next(stream)
        for target, weight in zip(batch["targets"].ravel(), batch["weights"].ravel(), strict=True):
            assert target == ord("\n") or weight == weight_of[target]
    assert batch["weights"].dtype == np.float32
    assert "weights" not in next(TokenStreams(weighted_by_one(corpus), batch=2, length=3)).arrays


def weighted_by_one(corpus):
    return Corpus(corpus.tokens, corpus.token_bytes, corpus.extra, "", corpus.starts)


def test_an_evaluation_counts_every_token_with_a_weight_once(weighted):
    stream = EvalStream(weighted["valid"], batch=1, length=8)
    (batch,) = stream
    assert bytes(batch["targets"][0, :4].astype(np.uint8)) == b"\nyy\n"
    assert batch["weights"][0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert stream.num_targets == stream.num_bytes == 3


def test_a_mixture_keeps_weights(weighted):
    corpus, other = weighted["train"], weighted_by_one(weighted["train"])
    both = joined([corpus, other], [0.5, 0.5])
    expected = np.repeat([1.0, 0.5, 0.0, 2.0, 1.0], [4, 3, 2, 5, 14])
    np.testing.assert_array_equal(both.weights_at(np.arange(28)), expected)
    long = Corpus(
        np.tile(corpus.tokens, 20), corpus.token_bytes, corpus.extra, "", weights=np.array([[100.0, 3.0]])
    )
    plain = Corpus(np.tile(corpus.tokens, 20), corpus.token_bytes, corpus.extra, "")
    stream = MixedStreams(Mixture((long, plain), (0.5, 0.5)), batch=2, length=4)
    seen = np.unique([next(stream)["weights"] for _ in range(64)])
    assert seen.tolist() == [1.0, 3.0]


def test_the_last_lines_are_held_out(tmp_path):
    data = written(tmp_path / "all.jsonl", *({"text": str(i)} for i in range(10)))
    read = corpora(data, tmp_path / "run", holdout=0.2)
    assert bytes(read["train"].tokens) == b"0\n1\n2\n3\n4\n5\n6\n7\n"
    assert bytes(read["valid"].tokens) == b"8\n9\n"
    assert not read["train"].is_weighted


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{\n", "line 2 is not JSON: "),
        ("[1]\n", r"line 2 must be an object, got \[1\]"),
        ({"txt": "a"}, "line 2: text is missing"),
        ({"text": 3}, "line 2: text must be a string, got 3"),
        ({"text": "a", "weight": -1}, "line 2: weight must be at least 0, got -1"),
        ({"text": "a", "weight": True}, "line 2: weight must be a number, got true"),
        ('{"text": "a", "weight": NaN}\n', "line 2 is not JSON: NaN is not a finite number"),
        ('{"text": "\\ud800"}\n', "line 2: text is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    data = written(tmp_path / "bad.jsonl", {"text": "a"}, line, {"text": "b"}, {"text": "c"})
    with pytest.raises(UserError, match=rf"^--data: {tmp_path}/bad.jsonl, {words}"):
        corpora(data, tmp_path / "run")


def test_a_text_without_counted_tokens(tmp_path):
    data = written(tmp_path / "none.jsonl", {"text": "a"}, {"text": "b", "weight": 0})
    with pytest.raises(UserError, match="--data: every token of the held-out text has the weight 0"):
        EvalStream(corpora(data, tmp_path / "run")["valid"], batch=1, length=2)
