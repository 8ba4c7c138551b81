"""The numbers that evaluations report, with values computed by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from eval.harness.output import Measured
from eval.tasks import context, copy, forecast, recall, regression
from eval.tasks.context import Boundaries
from train.data.copying import BEGIN, END, SPECIAL
from train.data.tokenizers.base import continuation


def test_runs_share_the_shortest_reach_the_longest_history_and_the_shortest_block():
    own = [Boundaries(3, 40, 16), Boundaries(9, 30, 8)]
    assert context.common_boundaries(own, context.ContextOptions()) == (3, 40, 8)
    chosen = context.ContextOptions(reach=0, history=5, block=4)
    assert context.common_boundaries(own, chosen) == (0, 5, 4)


def test_targets_begin_after_the_first_token(monkeypatch):
    """`generate` returns BEGIN and its continuation."""
    symbols = 5

    def generate(model, variables, prompt, *, stop_tokens, max_new_tokens, **_):
        assert prompt.tolist() == [[symbols + BEGIN]] * 2
        assert stop_tokens == [symbols + END]
        return np.array([[symbols + BEGIN, 3, 4], [symbols + BEGIN, 1, 2]])[:, : max_new_tokens + 1]

    monkeypatch.setattr(copy, "generate", generate)
    model = SimpleNamespace(vocab_size=symbols + SPECIAL)
    run = SimpleNamespace(model=None, params=None, config=SimpleNamespace(model=model))
    assert copy.write_targets(run, np.zeros((2, 3)), None, 2).tolist() == [[3, 4], [1, 2]]


def test_the_band_of_samples_and_of_errors():
    drawn = np.append(np.arange(10.0), 100.0).reshape(11, 1, 1, 1)
    made = forecast.of_samples(np.array([7]), drawn)
    assert [float(x.squeeze()) for x in made[1:]] == [5.0, pytest.approx(145 / 11), 1.0, 9.0]
    errors = np.arange(-5.0, 6.0).reshape(11, 1, 1)  # quantiles 0.1 and 0.9: -4 and 4
    made = forecast.with_band(np.array([7]), np.full((1, 1, 1), 10.0), errors)
    assert [float(x.squeeze()) for x in made[1:]] == [10.0, 10.0, 6.0, 14.0]


def test_errors_and_coverage_of_forecasts():
    true = np.array([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert forecast.errors_of(true + np.array([[1.0], [3.0]]), true - 2.0, true) == {"mae": 2.0, "mse": 4.0}
    low = np.array([[[1.0], [2.5]], [[0.0], [0.0]]])
    high = np.array([[[9.0], [9.0]], [[3.0], [3.5]]])
    made = forecast.Forecasts(np.array([0, 1]), true, true, low, high)
    assert forecast.coverage(made, true) == 0.5  # on both ends of the band, and outside both


@pytest.mark.parametrize(
    ("windows", "shown"), [(1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 1, 2]), (9, [2, 4, 6])]
)
def test_a_picture_shows_no_window_twice(windows, shown):
    ones = np.ones(1)
    series = SimpleNamespace(values=np.zeros((20, 1)), columns=("OT",), mean=ones, deviation=ones)
    zeros = np.zeros((windows, 2, 1))
    made = forecast.Forecasts(np.arange(windows) + 4, *[zeros] * 4)
    result = {"horizon": 2, "lookback": 4, "model": "m", "data": "d"}
    figure = forecast.draw([Measured(result, forecast.Example(series, zeros, made))])
    assert [axes.get_title() for axes in figure.axes] == [f"m, d row {4 + place}" for place in shown]


def test_when_recall_was_learned(monkeypatch):
    lines = [{"step": 1, "val_accuracy": 0.89}, {"step": 2}, {"step": 3, "val_accuracy": 0.9}]
    monkeypatch.setattr(recall, "read_metrics", lambda workdir: lines)
    assert recall.learned_at("run") == 3
    monkeypatch.setattr(recall, "read_metrics", lambda workdir: lines[:2])
    assert recall.learned_at("run") is None


@pytest.mark.parametrize(("steps", "seconds"), [(1, [4.0, 5.0]), (3, [8.0, 9.0])])
def test_seconds_of_training(monkeypatch, steps, seconds):
    """Sums pairs over rate; steps of the first call, which compiles, count as long as the first one after it."""
    lines = [
        *[{"step": 1, "tokens_per_second": 1.0}] * steps,
        {"step": 2, "tokens_per_second": 50.0, "val_loss": 0.5},
        {"step": 3, "tokens_per_second": 100.0, "val_loss": 0.25},
    ]
    monkeypatch.setattr(regression, "read_metrics", lambda workdir: lines)
    found = regression.read_curve("run", 100)
    assert found == {"step": [2, 3], "seconds": seconds, "error": [0.5, 0.25]}


class Words:
    """A tokenizer that puts a space between words, like Metaspace."""

    words = ("alpha", "beta", "gamma", "é")

    def decode(self, tokens):
        return " ".join(self.words[token] for token in tokens)


def test_prompt_and_text_are_the_decoded_row():
    assert continuation(Words(), [0], [1, 2]) == " beta gamma"
    assert continuation(Words(), [0], []) == ""

    class Bytes:
        def decode(self, tokens):
            return bytes(list(tokens)).decode("utf-8", errors="replace")

    first, second = "é".encode()
    assert continuation(Bytes(), [65, first], [second, 66]) == "éB"
