"""What eval.speed derives from its measurements: exponents, pictures."""

import numpy as np
import pytest
from matplotlib.image import imread

from eval.harness.pictures import line_styles, spread
from eval.harness.table import fitted_exponent
from eval.speed import report
from eval.speed.options import SpeedOptions
from eval.speed.pictures import draw

LENGTHS = (64, 1024, 2048, 8192)


def _rows(mechanisms=15):
    """Layers of made-up mechanisms; the second is quadratic, and too slow at the last length."""
    rows = []
    for i in range(mechanisms):
        for n in LENGTHS:
            power = 2 if i == 1 else 1
            if i == 1 and n == LENGTHS[-1]:
                rows.append({"length": n, "name": f"mechanism{i}", "note": "too slow: as expected"})
                continue
            cost = (1 + i) * float(n) ** power
            row = {
                "length": n,
                "name": f"mechanism{i}" if i else "full",
                "note": "",
                "forward_s": 1e-6 * cost,
                "forward_backward_s": 3e-6 * cost,
                "forward_temp_bytes": int(100 * cost),
                "forward_backward_temp_bytes": int(300 * cost),
                "parameters": 1000 * (i + 1),
            }
            if i != 2:
                row |= {"step_s": 1e-5 * (i + 1), "step_temp_bytes": 100, "state_bytes": 1000}
            rows.append(row)
    return report.complete(rows, "layers", SpeedOptions())


def test_fitted_exponent():
    rows = [{"length": n, "s": 3.0 * n**1.5} for n in LENGTHS]
    assert fitted_exponent(rows, "s", 2048) == pytest.approx(1.5)
    short = [{"length": 64, "s": 100.0}, *rows[1:]]  # ignored: below fit_from
    assert fitted_exponent(short, "s", 1024) == pytest.approx(1.5)
    assert fitted_exponent(short, "s", 64) != pytest.approx(1.5, abs=0.05)
    few = [{"length": 64, "s": 1.0}, {"length": 2048, "s": 32.0}]
    assert fitted_exponent(few, "s", 2048) == pytest.approx(1.0)
    assert fitted_exponent(few[:1], "s", 1) is None
    assert fitted_exponent([*rows, {"length": 99, "s": None}], "s", 1) == pytest.approx(1.5)


def test_exponents_of_every_case():
    fitted = {entry["name"]: entry for entry in report.exponents(_rows(), 1024)}
    assert fitted["full"]["forward_s"] == pytest.approx(1.0)
    assert fitted["mechanism1"]["forward_backward_s"] == pytest.approx(2.0)
    assert fitted["mechanism1"]["forward_temp_bytes"] == pytest.approx(2.0)
    assert fitted["full"]["step_s"] == pytest.approx(0.0, abs=1e-9)
    assert fitted["mechanism2"]["step_s"] is None


def test_ratios_and_tokens_per_second():
    row = next(row for row in _rows() if row["name"] == "mechanism3" and row["length"] == 2048)
    assert row["forward_ratio"] == pytest.approx(1 / 4)
    assert row["step_ratio"] == pytest.approx(1 / 4)
    assert row["forward_tokens_per_s"] == pytest.approx(1e6 / 4)
    assert row["step_tokens_per_s"] == pytest.approx(1e5 / 4)


@pytest.mark.slow
def test_a_panel_for_what_was_measured(tmp_path):
    """Networks that only infer have one panel, decoders three, and layers four though one of them cannot decode."""
    measured = {"forward_s": 0.5, "train_s": 2.0, "train_bytes": 2**24}
    rows = [
        {"level": level, "name": "full", "length": n, "note": ""}
        | {name: n * measured[name] for name in fields}
        for level, fields in {"encoders": ("forward_s",), "decoders": tuple(measured)}.items()
        for n in (128, 256)
    ]
    paths = draw([*rows, *_rows(mechanisms=3)], 1, tmp_path)
    assert [path.name for path in paths] == ["encoders.png", "decoders.png", "layers.png"]
    encoders, *others = (imread(path).shape[1] for path in paths)
    assert others == pytest.approx([3 * encoders, 4 * encoders], rel=0.01)


def test_nothing_measured_draws_nothing(tmp_path):
    rows = [row for row in _rows() if row["note"]]
    assert draw(rows, 1024, tmp_path) == []


def test_no_two_lines_look_alike():
    styles = line_styles([str(i) for i in range(100)])
    assert len({tuple(map(str, style.values())) for style in styles.values()}) == 100


def test_labels_are_spread():
    places = spread([0.5, 0.1, 0.5, 0.98], 0.1, 0.0, 1.0)
    assert places[1] == 0.1
    assert places[3] == 0.98
    assert np.diff(sorted(places)).min() >= 0.1 - 1e-9
    crowded = spread([0.9] * 5, 0.5, 0.0, 1.0)
    np.testing.assert_allclose(sorted(crowded), [0.0, 0.25, 0.5, 0.75, 1.0])
