"""eval.learning_rates: losses equal separate runs', and the table names each width's best rate."""

import json

import numpy as np
import pytest

import eval.studies.learning_rates
from eval.studies.learning_rates import RateOptions, draw, losses, main, measure

TINY = "--widths 16 32 --num_heads 2 --num_layers 1 --steps 4 --batch 2 --length 16 --rates 0.001 0.01"


@pytest.mark.slow
def test_command(tmp_path, capsys):
    picture = tmp_path / "rates.png"
    main([*TINY.split(), "--picture", str(picture)])
    standard, ours = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (standard["parametrization"], ours["parametrization"]) == ("standard", "muP")
    # The narrowest width is the base, where both are the same.
    assert ours["loss"][0] == pytest.approx(standard["loss"][0], rel=1e-5)
    assert ours["loss"][1] != pytest.approx(standard["loss"][1], rel=1e-5)
    for result in (standard, ours):
        for row, best in zip(result["loss"], result["best"]):
            assert row[result["rates"].index(best)] == min(row)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_rates_do_not_touch_each_other():
    settings = {"widths": (16, 32), "num_heads": 2, "num_layers": 1, "steps": 4, "batch": 2, "length": 16}
    both = losses(RateOptions(rates=(0.001, 0.01), **settings), 16, "muP", 0)
    alone = losses(RateOptions(rates=(0.01,), **settings), 16, "muP", 0)
    assert both[1] == pytest.approx(alone[0], rel=1e-5)
    assert both[0, 0] == pytest.approx(both[1, 0], rel=1e-6)
    assert both[0, -1] > both[1, -1]  # the larger rate has made more progress


def test_no_rate_is_best_where_none_has_a_finite_loss(monkeypatch):
    tables = {16: [[1.0], [np.nan]], 32: [[np.nan], [np.inf]]}
    monkeypatch.setattr(
        eval.studies.learning_rates, "losses", lambda options, width, *_: np.array(tables[width], np.float32)
    )
    result = measure(RateOptions(widths=(16, 32), rates=(0.001, 0.01), steps=1), "muP")
    assert result["loss"] == [[1.0, None], [None, None]]
    assert result["best"] == [0.001, None]
    rings = [line for line in draw([result]).axes[0].lines if line.get_fillstyle() == "none"]
    assert len(rings) == 1
