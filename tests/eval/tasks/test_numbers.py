"""The numbers that evaluations report, with values computed by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from eval.tasks import context, copy, forecast, glue, graph, lra, recall, regression
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


def test_averages_of_seeds():
    runs = [
        {"task": "text", "model": "brl", "accuracy": accuracy, "standard_error": 0.03, "chance": 0.5}
        for accuracy in (0.6, 0.8)
    ]
    # In percent, the mean is 70. The spread 14.14 / sqrt 2 = 10 exceeds the answers' error 3 / sqrt 2.
    mean, error, seeds = lra.summarise(runs)["brl"]["text"]
    assert (mean, error, seeds) == (pytest.approx(70.0), pytest.approx(10.0), 2)
    alike = [run | {"accuracy": 0.7} for run in runs]
    assert lra.summarise(alike)["brl"]["text"][1] == pytest.approx(3 / 2**0.5)
    scores = [
        {"dataset": "ACM", "network": "brl", "micro_f1": f1, "macro_f1": 50.0, "step_megabytes": 3.0}
        for f1 in (90.0, 94.0)
    ]
    found = graph.summarise(scores)["ACM", "brl"]
    assert found["micro_f1"] == (92.0, pytest.approx(8**0.5), 2)
    assert found["step_megabytes"] == (3.0, 0.0, 2)
    runs = [
        {"task": "rte", "model": "brl", "pretrained": True, "metrics": ["accuracy"], "accuracy": value}
        for value in (60.0, 64.0)
    ]
    assert glue.summarise(runs) == {"brl, pretrained": {"rte accuracy": (62.0, pytest.approx(2.0), 2)}}


def test_metrics_of_classifications():
    pytest.importorskip("sklearn")
    predicted, true = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 1])
    found = glue.task_metrics("mrpc", predicted, true)
    assert found == {"accuracy": pytest.approx(75.0), "f1": pytest.approx(80.0)}  # 2 of 2 and 2 of 3
    # Matthews: (2 * 1 - 0 * 1) / sqrt(2 * 3 * 1 * 2)
    assert glue.task_metrics("cola", predicted, true)["matthews"] == pytest.approx(100 * 2 / 12**0.5)
    assert glue.task_metrics("stsb", np.ones(4), true * 1.0) == {"pearson": 0.0, "spearman": 0.0}
    found = graph.f1_scores(predicted, true)
    # Class 0: 1 of 2 and 1 of 1 are right, F1 2/3; class 1: 2 of 2 and 2 of 3, F1 4/5.
    assert found == {"micro_f1": pytest.approx(75.0), "macro_f1": pytest.approx(100 * (2 / 3 + 4 / 5) / 2)}


def test_when_recall_was_learned_and_the_frontier(monkeypatch):
    lines = [{"step": 1, "val_accuracy": 0.89}, {"step": 2}, {"step": 3, "val_accuracy": 0.9}]
    monkeypatch.setattr(recall, "read_metrics", lambda workdir: lines)
    assert recall.learned_at("run") == 3
    monkeypatch.setattr(recall, "read_metrics", lambda workdir: lines[:2])
    assert recall.learned_at("run") is None

    def group(size, *accuracies):
        case = {"length": 8, "pairs": 2, "state_bytes": size}
        return [{"trained": [[8, 2]], "cases": [case | {"accuracy": a}]} for a in accuracies]

    groups = [group(200, 0.5, 0.7), group(100, 0.4), group(300, 0.55), group(100, 0.2)]
    found = recall.frontier(groups, lambda result: result["cases"][0]["state_bytes"])
    assert found == [(100, 0.4), (200, pytest.approx(0.6))]


def test_seconds_of_training(monkeypatch):
    """Sums pairs over rate; the first step, which compiles, counts as long as the second."""
    lines = [
        {"step": 1, "tokens_per_second": 1.0},
        {"step": 2, "tokens_per_second": 50.0, "val_loss": 0.5},
        {"step": 3, "tokens_per_second": 100.0, "val_loss": 0.25},
    ]
    monkeypatch.setattr(regression, "read_metrics", lambda workdir: lines)
    found = regression.read_curve("run", 100)
    assert found == {"step": [2, 3], "seconds": [4.0, 5.0], "error": [0.5, 0.25]}


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
