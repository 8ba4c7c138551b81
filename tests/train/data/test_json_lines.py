"""Files with a JSON object a line: their documents, and how much these count in the loss."""

import json

import numpy as np
import pytest

from tests.support.texts import corpus_of
from tests.train.pretrained import TEMPLATE, write_tokenizer
from train.data.dataset import DataConfig, load
from train.data.mixture import MixedStreams, Mixture, joined
from train.data.packed import PackedHeldOut, PackedStreams, fill_rows
from train.data.streams import EvalStream, TokenStreams
from train.data.tokenizers.chat import ChatTemplate, template_of
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
    assert "weights" not in next(TokenStreams(corpus_of(corpus.tokens), batch=2, length=3)).arrays


def test_an_evaluation_counts_every_token_with_a_weight_once(weighted):
    stream = EvalStream(weighted["valid"], batch=1, length=8)
    (batch,) = stream
    assert bytes(batch["targets"][0, :4].astype(np.uint8)) == b"\nyy\n"
    assert batch["weights"][0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert stream.num_targets == stream.num_bytes == 3


def test_a_mixture_keeps_weights(weighted):
    corpus = weighted["train"]
    both = joined([corpus, corpus_of(corpus.tokens, starts=corpus.starts)], [0.5, 0.5])
    expected = np.repeat([1.0, 0.5, 0.0, 2.0, 1.0], [4, 3, 2, 5, 14])
    np.testing.assert_array_equal(both.weights_at(np.arange(28)), expected)
    tokens = np.tile(corpus.tokens, 20)
    both = corpus_of(tokens, weights=np.array([[100.0, 3.0]])), corpus_of(tokens)
    stream = MixedStreams(Mixture(both, (0.5, 0.5)), batch=2, length=4)
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
        ({"txt": "a"}, "line 2: expected text, messages, or prompt and completion, got txt"),
        ({"text": "a", "messages": []}, "line 2: expected text, messages, or prompt and completion, got text, mes"),
        ({"prompt": "a"}, "line 2: completion is missing"),
        ({"messages": "a"}, 'line 2: messages must be a list, got "a"'),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\]: content is missing"),
        ({"messages": [{"role": "robot", "content": ""}]},
         r"line 2: messages\[0\]: role must be one of system, .*'robot'"),
        ({"messages": [{"role": "user", "content": ""}]}, "line 2: messages must have one of the role assistant"),
        ({"prompt": "a", "completion": "b"}, "line 2: a chat needs a tokenizer with a chat template"),
        ({"text": 3}, "line 2: text must be a string, got 3"),
        ({"text": "a", "weight": -1}, "line 2: weight must be at least 0, got -1"),
        ({"text": "a", "weight": True}, "line 2: weight must be a number, got true"),
        ('{"text": "a", "weight": NaN}\n', "line 2 is not JSON: NaN is not a finite number"),
        ('{"text": "\\ud800"}\n', "line 2: not UTF-8"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, words):
    data = written(tmp_path / "bad.jsonl", {"text": "a"}, line, {"text": "b"}, {"text": "c"})
    with pytest.raises(UserError, match=rf"^--data: {tmp_path}/bad.jsonl, {words}"):
        corpora(data, tmp_path / "run")


def test_a_text_without_counted_tokens(tmp_path):
    data = written(tmp_path / "none.jsonl", {"text": "a"}, {"text": "b", "weight": 0})
    with pytest.raises(UserError, match="--data: every token of the held-out text has the weight 0"):
        EvalStream(corpora(data, tmp_path / "run")["valid"], batch=1, length=2)


QUESTION, ANSWER = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}


def answers(source, messages):
    parts = list(ChatTemplate(source, {"eos_token": "</s>"}).parts(messages))
    return "".join(text for text, _ in parts), [text for text, is_answer in parts if is_answer and text]


@pytest.mark.parametrize("marked", [False, True])
def test_the_answers_of_a_chat(marked):
    source = TEMPLATE
    if marked:
        said = "{{ message.content + '<|im_end|>\n' }}"
        source = (
            "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
            "{% if message.role == 'assistant' %}"
            f"{{% generation %}}{said}{{% endgeneration %}}{{% else %}}{said}{{% endif %}}{{% endfor %}}"
        )
    text, found = answers(source, [QUESTION, ANSWER, QUESTION, ANSWER | {"content": "four"}])
    turn = "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{turn}4<|im_end|>\n{turn}four<|im_end|>\n"
    assert found == ["4<|im_end|>\n", "four<|im_end|>\n"]


def test_what_a_template_may_do():
    spelled = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content }}{% if loop.last and m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert answers(spelled, [QUESTION, ANSWER]) == ("2 + 24</s>", ["4</s>"])
    with pytest.raises(
        ValueError, match="the chat template writes message 2 in another way if it is the last"
    ):
        answers(spelled, [QUESTION, ANSWER, QUESTION])
    with pytest.raises(ValueError, match="the chat template refuses the messages: no system"):
        answers(spelled, [QUESTION | {"role": "system"}, ANSWER])
    with pytest.raises(ValueError, match=r"the chat template refuses the messages: .*unsafe"):
        answers("{{ messages.__class__.__mro__ }}", [QUESTION, ANSWER])
    with pytest.raises(UserError, match="--tokenizer: its chat template cannot be read"):
        answers("{% for %}", [QUESTION, ANSWER])


def test_templates_of_a_tokenizer():
    several = [
        {"name": "rag", "template": "a"},
        {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"},
    ]
    config = {
        "chat_template": several,
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
    }
    assert list(template_of({**config}).parts([])) == [("<s></s>", False)]
    assert template_of({"eos_token": "</s>"}) is None
    assert template_of({"chat_template": several[:1]}) is None


@pytest.fixture
def chats(tmp_path):
    """The tokenizer and the tokens of two chats and a text. One of them is held out."""
    write_tokenizer(tmp_path)
    lines = [
        {"messages": [QUESTION, ANSWER], "weight": 3},
        {"prompt": "sky", "completion": "blue"},
        {"text": "grass is green"},
    ]
    data = written(tmp_path / "all.jsonl", *lines)
    config = DataConfig(data=data, tokenizer=str(tmp_path / "tokenizer.json"))
    tokenizer, read = load(config, tmp_path / "run", ("train", "valid"))
    again, _ = load(config, tmp_path / "run", ("valid",))
    assert again.digest == tokenizer.digest
    assert again.chat_template is not None
    return tokenizer, read


def test_only_answers_count(chats):
    tokenizer, read = chats
    corpus = read["train"]
    text = tokenizer.decode(corpus.tokens)
    assert text == (
        "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nsky<|im_end|>\n<|im_start|>assistant\nblue<|im_end|>\n"
    )
    weights = corpus.weights_at(np.arange(len(corpus.tokens)))
    assert tokenizer.decode(corpus.tokens[weights == 3]) == "4<|im_end|>\n"
    assert tokenizer.decode(corpus.tokens[weights == 1]) == "blue<|im_end|>\n"
    assert set(weights) == {0, 1, 3}
    assert corpus.tokens[0] == tokenizer.encode("<|im_start|>").item()
    assert set(read["valid"].weights_at(np.arange(4))) == {1}


def rows_by_hand(batch):
    """(tokens of a document in a row, the weights of its targets) of a batch."""
    for tokens, targets, ids, weights in zip(
        *(batch[n] for n in ("tokens", "targets", "segment_ids", "weights"))
    ):
        for number in np.unique(ids):
            places = np.flatnonzero(ids == number)
            yield bytes([*tokens[places], targets[places[-1]]]), weights[places]


def documents_of(*texts):
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    return corpus_of(np.frombuffer("".join(texts).encode(), np.uint8), starts=starts)


def test_rows_of_whole_documents():
    texts = ["ab", "cdef", "g", "hij", "klmnopqrstuv", "wx"]
    corpus = documents_of(*texts)
    assert len(fill_rows(corpus, range(6), 6, 24)) == 5
    stream = PackedStreams(corpus, batch=1, length=6, seed=3)
    for _ in range(3):
        seen = []
        for _ in range(stream.steps_per_pass):
            batch = next(stream)
            assert batch.reset
            for text, weights in rows_by_hand(batch):
                seen += [(text[i : i + 1], text[i + 1 : i + 2]) for i in np.flatnonzero(weights)]
        pairs = [(t[i : i + 1].encode(), t[i + 1 : i + 2].encode()) for t in texts for i in range(len(t) - 1)]
        assert sorted(seen) == sorted(pairs)


def test_held_out_documents_in_rows():
    texts = ["ab", "cdef", "g", "hij", "klmnopqrstuv", "wx"]
    corpus = documents_of(*texts)
    held_out = PackedHeldOut(corpus, batch=3, length=6)
    batches = list(held_out)
    assert len(batches) == len(held_out) == 2
    assert sum(batch["weights"].sum() for batch in batches) == held_out.num_bytes == 24 - 6
    assert sum(b["weights"].sum() for b in PackedHeldOut(corpus, batch=1, length=6, limit=8)) == 1 + 3 + 0 + 0
    with pytest.raises(UserError, match="no document of the held-out text has two tokens"):
        PackedHeldOut(documents_of("a", "b"), batch=1, length=4)
