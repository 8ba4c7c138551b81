"""The GPU kernels' numbers: natively with `-m gpu`, else in Triton's interpreter, which a process must choose before it
imports Triton."""

import collections
import importlib.util
import json
import math

import jax
import pytest

from pallas_kernels.triton.core.bridge import interprets, target_capability
from tests.laws.cases import ON_GPU_KERNELS
from tests.pallas_kernels.triton.cases import CASES
from tests.support.gpu import is_native
from tests.support.processes import python

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
    done = python("-m", *module, TRITON_INTERPRET="1", TRITON_DEFAULT_FP_FUSION="1", **environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """The result of each case that this session runs: an empty text, or why it failed."""
    path = tmp_path_factory.mktemp("triton") / "found.json"
    items = [x for x in request.session.items if getattr(x, "function", None) is test_results_and_gradients]
    run("tests.pallas_kernels.triton.cases", str(path), *(item.callspec.params["name"] for item in items))
    return json.loads(path.read_text())


def test_laws(request):
    """As many cases of each law as of other tests. A fraction would leave out whole laws, so it counts as one case."""
    cases, week = math.ceil(request.config.option.cases), request.config.option.cases_of
    sample = ("--cases", f"{cases}", "--cases-of", week)
    out = run("pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "gpu", *sample, "tests/laws")
    each = collections.Counter(law.partition("[")[0] for law in ON_GPU_KERNELS).values()
    assert f"{sum(min(number, cases or number) for number in each)} passed" in out


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
