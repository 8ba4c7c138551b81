"""What a command prints on a terminal and elsewhere, and which files it refuses."""

import json
import sys

import pytest

from eval.harness.output import emit, readable
from eval.harness.runs import first_rows, unfinished
from train.engine.checkpoint import Checkpoints

RESULT = {
    "perplexity": 12.34567,
    "tokens": 26624,
    "naive": {"mae": 0.5, "mse": 0.25},
    "curve": [1, 2],
    "step": 20,
    "split": "valid",
    "seasonal_naive": None,
    "workdir": "runs/stdlib",
}


def test_two_lines_on_a_terminal_and_json_elsewhere(monkeypatch, capsys):
    emit(RESULT)
    assert json.loads(capsys.readouterr().out) == RESULT
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit(RESULT)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "perplexity 12.35, tokens 26,624, naive.mae 0.5, naive.mse 0.25"
    assert second == "step 20, split valid, workdir runs/stdlib, with --json also curve"
    assert (first, second) == readable(RESULT)
    cases = [{"length": 64, "pairs": 4, "rows": 9, "accuracy": 0.25, "chance": 0.1}] * 2
    assert readable({"cases": cases})[0] == "; ".join(["length 64 pairs 4: accuracy 0.25"] * 2)
    assert readable({"cases": cases * 9, "trained": [[1, 2]]})[0] == ""
    emit(RESULT, as_json=True)
    assert json.loads(capsys.readouterr().out) == RESULT


class Rows:
    """A task whose rows have 1 or 2 positions; its batches have 2."""

    def __init__(self, *batches):
        self.batches = batches

    def load(self, config, splits):
        return splits

    def batch_shapes(self, config, rows):
        import jax
        import numpy as np

        return {name: jax.ShapeDtypeStruct((rows, 2), np.float32) for name in ("x", "weights")}

    def held_out(self, config, data, split):
        assert data == (split,)
        return self.batches


def test_the_first_rows_are_the_largest_with_a_weight():
    import numpy as np

    from eval.harness.runs import Run

    def batch(x, weights):
        return {"x": np.asarray(x, np.float32), "weights": np.asarray(weights, np.float32)}

    short = batch([[1], [2]], [[1], [1]])
    wide = batch([[3, 3], [4, 4], [5, 5]], [[0, 0], [0, 0.5], [1, 1]])
    last = batch([[6, 6]], [[1, 0]])
    run = Run(Rows(short, wide, last), None, None, None, 0)
    assert first_rows(run, "valid", 2)["x"].tolist() == [[4, 4], [5, 5]]
    assert first_rows(run, "valid", 1)["x"].tolist() == [[4, 4]]
    assert first_rows(run, "valid", 9)["x"].tolist() == [[4, 4], [5, 5], [6, 6]]
    assert first_rows(Run(Rows(short), None, None, None, 0), "valid", 9)["x"].tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("steps", "patience", "misses", "expected"),
    [(10, 0, 0, 6), (6, 0, 0, None), (10, 2, 1, 6), (10, 2, 2, None), (10, 0, 5, 6)],
)
def test_which_runs_are_unfinished(monkeypatch, steps, patience, misses, expected):
    from types import SimpleNamespace

    monkeypatch.setattr(Checkpoints, "steps", lambda self: [3, 6])
    monkeypatch.setattr(Checkpoints, "meta", lambda self, step: {"best": {"misses": misses}})
    config = SimpleNamespace(loop=SimpleNamespace(steps=steps, patience=patience))
    assert unfinished("run", config) == expected
