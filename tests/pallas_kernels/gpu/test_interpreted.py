"""The GPU kernels' numbers in Triton's interpreter, which must be chosen before a process imports Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pallas_kernels.gpu.cases import CASES

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed (pip install '.[gpu-test]')",
    ),
    pytest.mark.slow,
    pytest.mark.xdist_group("triton"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each case found: an empty text, or why it failed."""
    path = tmp_path_factory.mktemp("triton") / "found.json"
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "tests.pallas_kernels.gpu.cases", str(path)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(found, name):
    assert found[name] == "", found[name]
