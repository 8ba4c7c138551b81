"""eval.gpu_check: tables, float64 measures, its ending, and with Triton the checks in the interpreter."""

import json
import os
import time

import jax
import numpy as np
import pytest

from brl_jax.attention.core.by_platform import platform_jaxpr
from eval.chips import gpu_check, gpu_operations, gpu_worker
from pallas_kernels.triton.core import bridge
from pallas_kernels.triton.core.sizes import adjusted_tiles
from pallas_kernels.triton.local import api as local
from tests.support.processes import ROOT, python


def test_the_tasks_name_operations_and_kernels_that_exist():
    todo = gpu_check.tasks(gpu_check.GpuCheckOptions(tune=True))
    assert [task["order"] for task in todo] == list(range(len(todo)))
    operations = {task["operation"] for task in todo if task["kind"] in ("check", "speed", "tune")}
    assert operations == set(gpu_operations.OPERATIONS)
    assert operations < set(gpu_check.NAMES)
    for dtype in ("bfloat16", "float16", "float32"):
        checked = {task["operation"] for task in todo if task["kind"] == "check" and task["dtype"] == dtype}
        assert checked == set(gpu_operations.OPERATIONS)
    for task in todo:
        gpu_operations.Size(**task["size"])
    only = gpu_check.tasks(gpu_check.GpuCheckOptions(only=("fla", "local")))
    assert {task["operation"].split()[0] for task in only} == {"fla", "local"}


def trace_for_cuda(jaxpr):
    """Traces what a program runs on a GPU, which JAX does when it lowers the program."""
    for equation in jaxpr.eqns:
        for value in (platform_jaxpr(equation, "cuda"), *equation.params.values()):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                trace_for_cuda(inner)


@pytest.mark.parametrize("family", gpu_check.TUNED)
def test_a_tuned_call_launches_the_kernels_that_are_tuned(family, monkeypatch):
    """What a call takes by default can be another's kernel: a plain window takes cuDNN's."""
    pytest.importorskip("triton")
    monkeypatch.setattr(bridge, "_PACKAGES", ("triton",))
    tasks = [
        task
        for task in gpu_check.tasks(gpu_check.GpuCheckOptions(tune=True))
        if task.get("family", "") == family
    ]
    size = gpu_operations.Size(**tasks[0]["size"] | {"n": 1024})
    call = gpu_operations.OPERATIONS[tasks[0]["operation"]].call(size, tasks[0]["implementation"])
    arrays = gpu_operations.arrays(tasks[0]["operation"], size, "bfloat16")
    found = {}

    def adjust(family, sizes):
        found[family] = sizes
        return sizes

    with adjusted_tiles(adjust):
        trace_for_cuda(jax.make_jaxpr(call)(*arrays).jaxpr)
    for task in tasks:
        assert len(gpu_worker.neighbours(getattr(found[family], task["kernel"]))) > 2
    kernels = [name for name, size in found[family]._asdict().items() if isinstance(size, tuple)]
    assert sorted(task["kernel"] for task in tasks) == sorted(kernels)


def test_a_recurrence_by_hand():
    """Two tokens of one head with one feature: S = 2 * 3 = 6; then S / 2 + 1 * 4 = 7, read by queries 1 and 5."""
    column = lambda *values: np.asarray(values, np.float64).reshape(1, -1, 1, 1)  # noqa: E731
    size = gpu_operations.Size(n=2, heads=1, head_dim=1)
    arrays = column(1, 5), column(2, 1), column(3, 4)
    log_decay = np.log([[[0.9], [0.5]]])
    out = gpu_operations.OPERATIONS["scalar_decay"].oracle(size, *arrays, log_decay)
    np.testing.assert_allclose(out[0, :, 0, 0], [6.0, 35.0])
    # Keys of length 1 and beta 1: each token replaces the state.
    out = gpu_operations.OPERATIONS["delta"].oracle(size, *arrays, np.ones((1, 2, 1)))
    np.testing.assert_allclose(out[0, :, 0, 0], [3.0, 20.0])


def test_errors_by_hand():
    """The gradient of x^2 y, and one that is a tenth off."""
    x, y = np.asarray([1.0, -2.0, 0.5]), np.asarray([3.0, 1.0, -1.0])
    oracle, cotangent = (lambda x, y: x**2 * y), np.asarray([1.0, 2.0, -1.0])
    exact = 2 * x * y * cotangent
    assert gpu_worker.gradient_error(oracle, (x, y), 0, cotangent, exact) < 1e-8
    assert 0.02 < gpu_worker.gradient_error(oracle, (x, y), 0, cotangent, 1.1 * exact) < 0.3
    assert gpu_worker.relative_error(1.1 * exact, exact) == pytest.approx(0.1)
    assert gpu_worker.relative_error(exact * np.nan, exact) == np.inf


def test_a_cpu_has_no_kernels_to_time():
    assert gpu_worker.kernel_microseconds(jax.jit(jax.numpy.negative), [(jax.numpy.ones(3),)]) == {}


def test_tilings_around_one():
    tile = local.PairTile(128, 64, 8, 2)
    found = gpu_worker.neighbours(tile)
    assert found[0] == tile
    assert 10 <= len(found) <= 14
    assert len(set(found)) == len(found)
    assert {local.PairTile(64, 64, 4, 2), local.PairTile(128, 64, 8, 3)} < set(found)
    with adjusted_tiles(lambda operation, tiles: tiles._replace(forward=found[3])):
        assert local.choose_tiles(128, np.float16, False).forward == found[3]
    assert local.choose_tiles(128, np.float16, False).forward != found[3]


def run(*arguments, **environment):
    return python("-m", "eval.gpu_check", *arguments, **environment)


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path):
    for name in ("triton", "jax_triton"):  # any module can replace them in what runs before
        (tmp_path / f"{name}.py").touch()
    done = run("--workers", "1", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("eval.gpu_check: JAX finds no NVIDIA GPU here")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_end_is_hard(tmp_path):
    """Nothing runs after it, and the file has all results up to then."""
    pytest.importorskip("triton")
    path, start = tmp_path / "found.json", time.monotonic()
    done = run("--interpret", "True", "--minutes", "0.05", "--workers", "1", "--json", str(path))
    assert time.monotonic() - start < 60
    assert done.returncode == 1
    assert "not finished after 0.05 minutes" in done.stderr
    found = json.loads(path.read_text())
    assert not found["finished"]
    assert found["not_reached"]


TUNE = """
import itertools
import json
import sys

from eval.chips import gpu_worker

task = json.loads(sys.argv[1])
worker = gpu_worker.Worker(lambda message: None, interpret=True)
print(json.dumps([*itertools.islice(gpu_worker.tune(task, worker), 3)]))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("triton")
@pytest.mark.parametrize(("family", "kernel"), [("local", "key_gradient"), ("delta_by_feature", "states")])
def test_tuning_in_tritons_interpreter(family, kernel):
    pytest.importorskip("triton")
    todo = gpu_check.tasks(gpu_check.GpuCheckOptions(tune=True))
    task = next(t for t in todo if (t.get("family"), t.get("kernel")) == (family, kernel))
    task |= {"size": {"n": 40, "heads": 1, "head_dim": 16, "window": 9}, "dtype": "float32"}
    environment = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = python("-c", TUNE, json.dumps(task), given=3 * "go\n", **environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len({tuple(row["tile"]) for row in rows}) == 3
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["worst"] < 1e-5 for row in rows[1:])


@pytest.mark.slow
@pytest.mark.xdist_group("triton")
def test_the_checks_in_tritons_interpreter(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "found.json"
    done = run("--interpret", "True", "--only", "local", "propagate", "bsbr", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["finished"]
    checked = [(row["operation"], row["dtype"]) for row in found["rows"]]
    assert sorted(checked) == sorted(
        [(n, d) for n in ("local", "propagate") for d in ("float16", "float32")] + [("bsbr", "float32")]
    )
    for row in found["rows"]:
        assert 0 < row["worst"] <= gpu_worker.TOLERANCE[row["dtype"]]
        assert row["by"] == ("XLA" if row["implementation"] == "default" else "interpreter")
