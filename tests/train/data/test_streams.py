"""Streams: contiguous rows, wrapping passes, states that resume, shares of processes, each target counted once."""

import numpy as np
import pytest

from tests.support.processes import python
from tests.support.texts import corpus_of, numbered
from train.data.corpus import Corpus
from train.data.streams import EvalStream, TokenStreams
from train.engine.errors import UserError


def take(stream, count):
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize(("size", "batch", "length"), [(101, 3, 7), (64, 4, 8), (22, 1, 21), (1000, 8, 5)])
def test_rows_go_on_and_follow_each_other(size, batch, length):
    stream = TokenStreams(numbered(size), batch=batch, length=length, seed=3)
    steps = stream.steps_per_pass
    assert steps == size // (batch * length)
    starts = []
    for _ in range(3):
        batches = take(stream, steps)
        assert [bool(b.reset) for b in batches] == [True] + [False] * (steps - 1)
        tokens = np.concatenate([b["tokens"] for b in batches], 1)
        targets = np.concatenate([b["targets"] for b in batches], 1)
        # Row after row, position after position: one part of the text, wrapping at its end.
        np.testing.assert_array_equal(np.diff(tokens.ravel()) % size, 1)
        np.testing.assert_array_equal(targets, (tokens + 1) % size)
        assert tokens.shape == (batch, steps * length)
        starts.append(int(tokens[0, 0]))
    assert len(set(starts)) > 1


class Counting(np.ndarray):
    """An array that counts how often it is read."""

    reads = 0

    def take(self, *args, **kwargs):
        Counting.reads += 1
        return super().take(*args, **kwargs)


def test_resume_reads_nothing_of_what_it_skips():
    stream = TokenStreams(corpus_of(np.arange(100).view(Counting)), batch=2, length=8)
    state = stream.get_state()
    stream.set_state(state | {"step": 10**12})
    next(stream)
    stream.close()
    assert stream.step == 10**12 + 1
    assert 1 <= Counting.reads <= 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 4}, "batch 2, now it is 4"),
        ({"length": 4}, "length 8, now it is 4"),
        ({"corpus": numbered(100, digest="other")}, "digest d, now it is other"),
        ({"corpus": numbered(99, digest="d")}, "tokens 100, now it is 99"),
    ],
)
def test_a_state_of_something_else_is_refused(change, message):
    arguments = {"corpus": numbered(100, digest="d"), "batch": 2, "length": 8, "seed": 0}
    state = TokenStreams(**arguments).get_state()
    with pytest.raises(UserError, match=message):
        TokenStreams(**arguments | change).set_state(state)


def test_a_text_too_short_for_a_batch():
    with pytest.raises(
        UserError, match=r"--data: the text has 100 tokens.*--batch 4 times --length 25.* take 101"
    ):
        TokenStreams(numbered(100), batch=4, length=25)
    just_enough = corpus_of(np.arange(101, dtype=np.uint8))
    assert next(TokenStreams(just_enough, batch=4, length=25))["tokens"].dtype == np.int32


@pytest.mark.parametrize(
    ("size", "batch", "length"), [(101, 3, 7), (65, 4, 8), (2, 4, 3), (50, 1, 49), (50, 1, 60)]
)
def test_evaluation_counts_every_target_once(size, batch, length):
    stream = EvalStream(numbered(size), batch=batch, length=length)
    batches = list(stream)
    assert len(batches) == len(stream)
    assert [bool(b.reset) for b in batches] == [True] + [False] * (len(stream) - 1)
    assert all(
        b["tokens"].shape == b["targets"].shape == b["weights"].shape == (batch, length) for b in batches
    )
    counted = np.concatenate([b["weights"] for b in batches], 1).astype(bool)
    tokens = np.concatenate([b["tokens"] for b in batches], 1)
    targets = np.concatenate([b["targets"] for b in batches], 1)
    # Row by row, the whole text except its first token, and no row has a gap.
    np.testing.assert_array_equal(targets[counted], np.arange(1, size))
    np.testing.assert_array_equal(tokens[counted], np.arange(size - 1))
    assert not (np.diff(counted.astype(int), axis=1) > 0).any()
    assert not tokens[~counted].any()
    assert not targets[~counted].any()
    assert stream.num_targets == counted.sum() == size - 1
    assert [batch["tokens"].tolist() for batch in stream] == [batch["tokens"].tolist() for batch in batches]


def test_evaluation_of_a_part_counts_its_bytes():
    corpus = Corpus(
        np.array([0, 1, 2, 1, 0, 2, 2], np.uint8),
        np.array([1, 10, 100]),
        np.array([[0, 5], [3, 7], [5, 1000]]),
        "",
    )
    assert corpus.num_bytes() == 3 * 100 + 2 * 10 + 2 * 1 + 5 + 7 + 1000
    assert corpus.num_bytes(1, 4) == 10 + 100 + 10 + 7
    assert corpus.num_bytes(4, 4) == 0
    stream = EvalStream(corpus, batch=2, length=2, limit=5)
    assert stream.num_targets == 4
    assert stream.num_bytes == 10 + 100 + 10 + 7 + 1
    assert sum(float(b["weights"].sum()) for b in stream) == 4


@pytest.mark.parametrize(("size", "limit"), [(1, None), (50, 1), (50, 0)])
def test_evaluation_of_too_little_is_refused(size, limit):
    with pytest.raises(UserError, match="at least 2 tokens"):
        EvalStream(numbered(size), batch=1, length=4, limit=limit)


@pytest.mark.slow
def test_a_program_ends_with_a_stream_half_read():
    program = """
import sys
import numpy as np
from train.data.corpus import Corpus
from train.data.streams import TokenStreams
import train.tasks.lm
loaded = set(sys.modules)  # a command answers --help within two seconds
lazy = {"datasets", "matplotlib", "tensorflow", "tensorflow_datasets", "tokenizers", "torch"} & loaded
assert not lazy, lazy
others = {name for name in loaded if name.startswith("train.tasks.")}
own = ("lm", "lm_config", "conversion", "task", "run_config", "mup", "decoder_flops")
others -= {"train.tasks." + name for name in own}
assert not others, others
stream = TokenStreams(
    Corpus(np.arange(100), np.ones(100, np.int64), np.zeros((0, 2), np.int64), ""), batch=2, length=8
)
next(stream)
sys.exit(3)
"""
    done = python("-W", "error", "-c", program)
    assert (done.returncode, done.stderr) == (3, "")
