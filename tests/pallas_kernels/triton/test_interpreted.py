"""The GPU kernels' numbers: natively with `-m gpu`, else in Triton's interpreter, which a process must choose before it
imports Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels.triton.core.bridge import interprets, target_capability
from tests.laws.cases import ON_GPU_KERNELS
from tests.pallas_kernels.triton.cases import CASES
from tests.support.gpu import is_native

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed (pip install '.[gpu-test]')",
    ),
    pytest.mark.slow,
    pytest.mark.xdist_group("triton"),
]


def run(*module, **environment):
    """Runs a module in a process that interprets Triton; Triton 3.9 warns without the second setting."""
    settings = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", *module], cwd=ROOT, env=os.environ | settings | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The result of each case: an empty text, or why it failed."""
    path = tmp_path_factory.mktemp("triton") / "found.json"
    run("tests.pallas_kernels.triton.cases", str(path))
    return json.loads(path.read_text())


def test_laws():
    out = run("pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/laws")
    assert f"{len(ON_GPU_KERNELS)} passed" in out


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(request, name):
    if not is_native(request.config):
        found = request.getfixturevalue("found")
        assert found[name] == "", found[name]
        return
    if name == "shard-map" and jax.device_count() < 2:
        pytest.skip(f"needs two devices, got {jax.device_count()}")
    if "ampere" in name and not interprets() and target_capability() // 10 != 8:
        pytest.skip("needs an A100, whose code other GPUs cannot run")
    # The process that interprets has JAX's own rules too.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        CASES[name]()
