"""The linear probe of the Long Range Arena's encoders."""

import pytest

import eval.tasks.lra_probe
from train.engine.errors import UserError


def test_bad_input_is_named():
    with pytest.raises(UserError, match=r"--workdir: expected the folder of a run of train\.lra, got none"):
        eval.tasks.lra_probe.main([])
