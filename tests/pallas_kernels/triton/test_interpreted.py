"""The GPU kernels' numbers in Triton's interpreter, which a process must choose before it imports Triton."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pallas_kernels.triton.cases import CASES

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


# Mechanisms for each operation: local attention and gated attention units in a decoder, compress and propagate in an
# encoder, compress by blocks in a decoder, native sparse attention, and each kind of recurrence.
LAWS = (
    "law_1_causal[local-sinks]",
    "law_1_causal[gau]",
    "law_2_generation_is_training[local-sinks]",
    "law_3_oracle[local-sinks-causal]",
    "law_3_oracle[gau-causal]",
    "law_3_oracle[native_sparse-causal]",
    "law_3_oracle[linear-causal]",
    "law_3_oracle[mamba2-causal]",
    "law_3_oracle[gla-causal]",
    "law_3_oracle[deltanet-causal]",
    "law_3_oracle[gated_deltanet-causal]",
    "law_3_oracle[kda-causal]",
    "law_3_oracle[brl-output-bidirectional]",
    "law_3_oracle[brl-output-causal]",
    "law_4_packing[local-sinks]",
    "law_4_packing[gau]",
    "law_4_packing[native_sparse]",
    "law_4_packing[gated_deltanet]",
    "law_4_padding[brl-output]",
)


def test_laws():
    names = [f"tests/laws/test_laws.py::test_{name}" for name in LAWS]
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    out = run("pytest", *options, *names, BRL_JAX_LAWS_IMPLEMENTATION="triton_interpret")
    assert f"{len(LAWS)} passed" in out


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(found, name):
    assert found[name] == "", found[name]
