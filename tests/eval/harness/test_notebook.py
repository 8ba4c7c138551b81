"""eval.harness.notebook: the contents of a growing picture."""

import pytest

from eval.harness.notebook import Curves

pytest.importorskip("IPython")


def test_a_run_grows_under_a_bar(monkeypatch):
    shown = []
    curves = Curves({"loss": "training", "val_loss": "held out"}, ylabel="loss", level=(1.0, "guessing"))
    for slot in (curves._bar, curves._picture):
        monkeypatch.setattr(slot, "show", shown.append)
    with curves.report("<full>", 2) as report:
        report.step({"step": 1, "loss": 3.0})
        report.busy("evaluating")
        report.step({"step": 2, "loss": 2.0, "val_loss": 2.5})
    assert curves.points == {"<full>, training": [(1, 3.0), (2, 2.0)], "<full>, held out": [(2, 2.5)]}
    (axes,) = curves.figure().axes
    assert [line.get_label() for line in axes.lines] == ["<full>, training", "<full>, held out", "guessing"]
    bars = [each.data for each in shown if hasattr(each, "data") and isinstance(each.data, str)]
    assert 'value="0" max="2"' in bars[0]
    assert "&lt;full&gt;: compiling" in bars[0]
    assert 'value="2" max="2"' in bars[-1]
    assert "step 2 of 2, loss 2.000" in bars[-1]
    assert any(isinstance(each.data, bytes) and each.data.startswith(b"\x89PNG") for each in shown)
