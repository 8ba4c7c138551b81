"""The numbers that studies report, with values computed by hand."""

import numpy as np
import pytest

from eval.harness.output import Measured
from eval.harness.table import straight_line
from eval.studies import compute, jacobian, tlinformer_operations
from eval.studies.coordinates import WidthOptions, text_batch


def test_places_end_with_the_last_token():
    found = jacobian.spaced_places(np.array([16, 3]), 4)
    assert found.tolist() == [[3, 7, 11, 15], [0, 0, 1, 2]]


def test_finished_runs_are_preferred():
    whole = [Measured({"whole": whole, "workdir": "run"}) for whole in (True, False)]
    assert compute.select(whole) == whole[:1]
    assert compute.select(whole[1:]) == whole[1:]


def test_equations_4_and_5_of_tlinformer():
    options = tlinformer_operations.OperationsOptions(
        lengths=(4, 6), window=2, context=3, hidden=1, layers=6, heads=1, head_dim=10
    )
    # Two blocks. miss: 8 (6 + 2) + (9 + 4 + 6) + 4 - 6 = 81; hit: 8 - 2 + 2 * 3 + 3 * 4 = 24.
    assert tlinformer_operations.paper_cost("miss", 8, options) == 2 * 10 * 81
    assert tlinformer_operations.paper_cost("hit", 8, options) == 2 * 10 * 24
    # Scores and values of 2 (3 + 2) + 3 pairs, and of one per block in a hit.
    assert tlinformer_operations.pair_slope("miss", options) == 2 * 10 * 13
    assert tlinformer_operations.pair_slope("first", options) == 2 * 10 * 11
    assert tlinformer_operations.pair_slope("hit", options) == 2 * 10 * 2
    line = straight_line([1, 2, 3], [2.0, 4.0, 6.0])
    assert line == pytest.approx({"slope": 2.0, "at_0": 0.0, "r_squared": 1.0}, abs=1e-9)
    bent = straight_line([1, 2, 3], [0.0, 3.0, 0.0])
    assert bent["r_squared"] == pytest.approx(0.0, abs=1e-9)


def test_batches_of_text_go_on_where_the_last_one_ended():
    options = WidthOptions(batch=2, length=5)
    first, second = (text_batch(options, step) for step in (0, 1))
    text = np.concatenate([first["tokens"].ravel(), second["tokens"].ravel()])
    assert first["targets"].ravel().tolist() == text[1:11].tolist()
    assert bytes(text.astype(np.uint8)).startswith(b"# Author: ")
