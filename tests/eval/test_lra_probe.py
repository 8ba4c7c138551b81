"""The linear probe of the Long Range Arena's encoders."""

import numpy as np
import pytest

import eval.lra_probe
from eval.lra_probe import linear_answers
from train.errors import UserError


def test_a_linear_map_reads_what_is_linear_whatever_its_scale():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((600, 5)) * [1e-4, 1.0, 1.0, 50.0, 1.0] + 7.0
    labels = (features[:, 0] > 7.0).astype(int)
    found = linear_answers(features[:400], labels[:400], features[400:], 2)
    assert (found == labels[400:]).mean() > 0.9
    # What is not linear is not read.
    parity = ((features[:, 1] > 7.0) ^ (features[:, 2] > 7.0)).astype(int)
    found = linear_answers(features[:400], parity[:400], features[400:], 2)
    assert (found == parity[400:]).mean() < 0.65


def test_bad_input_is_named():
    with pytest.raises(UserError, match=r"--workdir: expected the folder of a run of train\.lra, got none"):
        eval.lra_probe.main([])
