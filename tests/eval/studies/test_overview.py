"""The table of all mechanisms agrees with the pages, and takes every figure from them."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from brl_jax.layers import MECHANISMS
from eval.studies.overview import pages, picture, table
from eval.studies.overview.main import kernel_makers, main, written
from tests.laws.cases import CASES, KERNELS

ROOT = Path(__file__).parents[3]
FIGURES = pages.figures(ROOT)


def test_the_pages_have_what_the_command_writes():
    for page, text in written(ROOT).items():
        assert page.read_text() == text, f"{page.name} is old: run python -m eval.overview"


def test_a_row_for_each_mechanism_within_the_page():
    lines = [line for line in table.full_table(FIGURES).splitlines() if line.startswith("|")]
    assert [re.match(r"\| `(\w+)`", line)[1] for line in lines[2:]] == list(MECHANISMS)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


def test_figures_by_hand():
    """Some figures from the pages; update both together."""
    assert FIGURES.recall["kda"] == "92.5"  # of "92.5 (88.3 to 97.3)"
    assert FIGURES.recall["norm"] == "76.9"  # in the second table of the page
    assert FIGURES.nats["local"] == "1.621"  # seed 0, not the row of seed 1
    assert FIGURES.nats["norm"] == "2.048"
    assert FIGURES.nats["brl"] == "1.629"  # not the row of output memory
    assert FIGURES.earlier_nats["kda"] == "1.589"
    assert "full" not in FIGURES.earlier_nats
    np.testing.assert_allclose(FIGURES.cpu["local"], 16384 / 2833)
    np.testing.assert_allclose(FIGURES.gpu["deltanet"], 1.072)
    np.testing.assert_allclose(FIGURES.h100["diag"], 0.449)
    assert {"local", "brl", "bilinear_mlr", "mamba2"} <= FIGURES.sharded
    assert not {"sinkhorn", "kernelized", "native_sparse"} & FIGURES.sharded


def test_cells():
    # Keys and values of 4,096 tokens with 256 features each, in float32.
    assert table.state("full") == "8,192+"
    # One matrix of 64 x 64 for each of 4 heads, and a sum of keys.
    assert table.state("linear") == "65"
    assert table.state("linformer") == ""
    assert table.measured("full", FIGURES)[:2] == ("[100.0][r]", "[1.660][t]")
    assert table.measured("rwkv7", FIGURES)[1] == "[*1.585*][e]"
    assert table.paper("gated_deltanet") == "2412.06464"
    assert table.address("Vpyg3fqXbl") == "https://openreview.net/forum?id=Vpyg3fqXbl"


def test_every_figure_has_a_link():
    for page in ("docs/mechanisms.md", "README.md"):
        text = (ROOT / page).read_text()
        used = set(re.findall(r"\]\[(\w)\]", text))
        defined = dict(re.findall(r"^\[(\w)\]: (\S+)$", text, re.MULTILINE))
        assert used <= defined.keys()
        for target in defined.values():
            name, anchor = target.split("#")
            heading = (ROOT / page).parent / name
            anchors = [
                re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", heading.read_text(), re.MULTILINE)
            ]
            assert anchor in anchors, (page, target)


def test_the_kernels_of_a_tpu_agree_with_law_8():
    by_law = {name for name, kind in MECHANISMS.items() for case in KERNELS if type(CASES[case]) is kind}
    # tlinformer launches one if its windows are shorter than by default.
    assert set(FIGURES.kernels["tpu"]) == by_law - {"tlinformer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "linear", "kda"])
def test_a_lowered_layer(name):
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote bfloat16 implicitly
        assert bool(kernel_makers(name, "tpu")) == (name in FIGURES.kernels["tpu"])


def test_the_picture_shows_what_was_measured():
    rows = pages.cost(ROOT)
    figure = picture.draw(rows, FIGURES.gpu)
    milliseconds, memory, gpu = figure.axes
    # With cuDNN, which is the default and so comes first in the page's table.
    assert [bar.get_width() for bar in gpu.patches] == [3.47, 1.072, 0.585, 0.426]
    lines = {line.get_label(): line for line in milliseconds.get_lines()}
    assert {"full, jax.nn", "local, window 256", "linear"} <= lines.keys()
    own = {row["length"]: row["forward_backward_s"] for row in rows if row["name"] == "linear"}
    np.testing.assert_allclose(lines["linear"].get_ydata(), [1e3 * own[n] for n in sorted(own)])
    assert all(len(line.get_xdata()) for line in memory.get_lines())


def test_the_command_writes_into_a_checkout(tmp_path):
    (tmp_path / "docs" / "data").mkdir(parents=True)
    for page in (
        "README.md",
        *(f"docs/{name}.md" for name in ("mechanisms", "results", "recall", "measured", "pods")),
    ):
        shutil.copy(ROOT / page, tmp_path / page)
    for name in ("cost", "kernels"):
        shutil.copy(ROOT / "docs" / "data" / f"{name}.json", tmp_path / "docs" / "data")
    changed = (tmp_path / "docs" / "results.md").read_text().replace("| 1.660 |", "| 1.234 |")
    (tmp_path / "docs" / "results.md").write_text(changed)
    main(["--root", str(tmp_path)])
    assert "[1.234][t]" in (tmp_path / "docs" / "mechanisms.md").read_text()
    assert "[1.234][t]" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "docs" / "cost.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "docs" / "data" / "kernels.json").read_text()).keys() == {"tpu", "cuda"}
